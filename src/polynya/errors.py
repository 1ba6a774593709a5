"""The error tree: which boundary was crossed, whether the policy can cause it, whether a retry can help.

    PolynyaError
      x UsageError                 somebody asked for something that cannot be: task file, option, run directory
        - TaskFileError · ConfigError · RunDirError
        - TaskConflict             the task id stands for another task
        - UnknownRecord            no task, session, node or delivery of this id
      x EngineError                the inference server
        - EngineUnavailable        no answer, 5xx, 429            retryable, infrastructure
        - EngineTimeout            no answer in time              retryable, infrastructure
        - EngineRejected           4xx on this request            the policy can cause it
          · ContextOverflow        prompt longer than the window  the policy can cause it
        - EngineProtocolError      an answer that cannot be read  infrastructure
        - EngineNotTrainable       no token ids or logprobs       refused at start
      x CaptureError               the journal
        - DiskFull                 no space for a record          infrastructure
      x RuntimeFailure             the sandbox
        - RuntimeUnavailable       this runtime does not work here
        - WorkspaceError           files or repository could not be laid out
      x HarnessError               the agent program
        - HarnessMissing           not installed and cannot be
        - HarnessFailed            it ran and failed              the policy can cause it
      x EvaluatorError             the grader could not give a verdict  infrastructure
      x GatewayError               the proxy
        - PortInUse
      x RegistryError              the store of tasks and results
        - RegistryUnavailable      busy, no space, gone              retryable, infrastructure
        - RegistryInUse            another server has it
        - QueueFull                more is waiting than is let in    retryable
      x ServerUnreachable          no answer of the rollout server       retryable, infrastructure
      x ServerRefused              it said no
      x StageTimeout               a stage spent its budget
      x SessionCancelled

A failure that the policy cannot cause never becomes a reward: the session ends as ``infra_error`` with ``reward: null``.
Every message names the field, the value and the fix.
"""

from __future__ import annotations

from typing import ClassVar


class PolynyaError(Exception):
    """Base of all errors that polynya raises on purpose.

    ``message`` says what is wrong (field and value), ``fix`` what to do about it (may be empty).
    """

    boundary: ClassVar[str] = "polynya"
    policy_can_cause: ClassVar[bool] = False
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} — {self.fix}" if self.fix else self.message

    @property
    def kind(self) -> str:
        """The class name, stable, as stored in results."""
        return type(self).__name__


class UsageError(PolynyaError):
    boundary = "user"


class TaskFileError(UsageError):
    """A task file, or a field of a task, cannot be read."""


class ConfigError(UsageError):
    """An option has a value that it cannot have."""


class RunDirError(UsageError):
    """The run directory cannot be created, written, resumed or read."""


class TaskConflict(UsageError):
    """A task id was given before, for another task."""


class UnknownRecord(UsageError):
    """The registry holds no task, session, node or delivery of this id."""


class EngineError(PolynyaError):
    boundary = "engine"


class EngineUnavailable(EngineError):
    """No connection, a 5xx or a 429 after the bounded retries."""

    retryable = True

    def __init__(self, message: str, *, fix: str = "", retry_after: float = 1.0, status: int | None = None) -> None:
        super().__init__(message, fix=fix)
        self.retry_after = retry_after
        """Seconds to suggest to the client."""
        self.status = status
        """HTTP status of the engine, None when there was no answer."""


class EngineTimeout(EngineUnavailable):
    """The engine did not answer within the budget of one call."""


class EngineRejected(EngineError):
    """The engine refused this request (4xx). ``status`` is its HTTP status, ``message`` its own words."""

    policy_can_cause = True

    def __init__(self, message: str, *, fix: str = "", status: int = 400) -> None:
        super().__init__(message, fix=fix)
        self.status = status


class NotContinuable(EngineRejected):
    """This request cannot be sent as ids by the route in use; as messages it can."""


class ContextOverflow(EngineRejected):
    """The prompt does not fit into the model's window."""

    def __init__(
        self, message: str, *, fix: str = "", prompt_tokens: int | None = None, window: int | None = None
    ) -> None:
        super().__init__(message, fix=fix, status=400)
        self.prompt_tokens = prompt_tokens
        self.window = window


class EngineProtocolError(EngineError):
    """The engine's answer cannot be read as what was asked for."""


class EngineNotTrainable(EngineError):
    """The engine gives no token ids or logprobs, so nothing that it samples can be trained on."""


class CaptureError(PolynyaError):
    """The journal refused or could not write a record."""

    boundary = "capture"


class DiskFull(CaptureError):
    """No space, or no permission, for a record. The call is not shown to the harness."""


class RuntimeFailure(PolynyaError):
    """The sandbox itself failed (not the program in it)."""

    boundary = "runtime"


class RuntimeUnavailable(RuntimeFailure):
    """This runtime does not work on this machine; ``message`` says why."""


class WorkspaceError(RuntimeFailure):
    """Files, repository or prepare commands of the task could not be laid out."""


class HarnessError(PolynyaError):
    boundary = "harness"


class HarnessMissing(HarnessError):
    """The harness is not installed, and the command could not install it."""


class HarnessFailed(HarnessError):
    """The harness ran and ended in failure. The policy can cause this, so the session is scored."""

    policy_can_cause = True


class EvaluatorError(PolynyaError):
    """The evaluator crashed, hung or lacked something: no verdict, so ``reward`` is null."""

    boundary = "evaluator"


class GatewayError(PolynyaError):
    boundary = "gateway"


class PortInUse(GatewayError):
    """The asked-for port is taken."""


class RegistryError(PolynyaError):
    boundary = "registry"


class RegistryUnavailable(RegistryError):
    """The database is busy, full, damaged or gone. Nothing of the operation was kept, or it may be asked for again as it is."""

    retryable = True


class RegistryInUse(RegistryError):
    """Another server has this registry open."""


class ServerUnreachable(PolynyaError):
    """The rollout server gave no answer."""

    boundary = "server"
    retryable = True


class ServerRefused(PolynyaError):
    """The rollout server said no. ``status`` is its HTTP status."""

    boundary = "server"

    def __init__(self, message: str, *, fix: str = "", status: int = 400) -> None:
        super().__init__(message, fix=fix)
        self.status = status


class QueueFull(RegistryError):
    """So many sessions wait that no further task is let in."""

    retryable = True

    def __init__(self, message: str, *, fix: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, fix=fix)
        self.retry_after = retry_after
        """Seconds after which to ask again."""


class StageTimeout(PolynyaError):
    """A stage spent its budget. RUNNING may time out because of the policy; the others are infrastructure."""

    boundary = "node"

    def __init__(self, stage: str, seconds: float) -> None:
        super().__init__(f"stage {stage} spent its budget of {seconds:g} s", fix=f"raise budgets.{stage} in the task")
        self.stage = stage
        self.seconds = seconds


class SessionCancelled(PolynyaError):
    """The session was cancelled by its owner."""

    boundary = "user"
