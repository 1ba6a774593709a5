"""What the registry keeps and can be asked: its records, and the one protocol that both databases stand behind.

The sentences that every implementation keeps:

- Submitting a task again is a no-op; its id with another spec is refused, naming the field.
- A claim raises a session's attempt. A completion counts only for the attempt that holds the lease; told again, it is acknowledged again.
- A session has at most one result, a group at most one end, each under one delivery id that never changes.
- What was answered is in the database. An operation that raised left nothing, or may be repeated as it is.
- Times are seconds of the caller's monotonic clock, given with each call; none of them means anything after ``start``.

Nothing here reads a clock, opens a socket or decides who gets work.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Protocol

import msgspec

from polynya.schema import ErrorInfo, Identifier, PositiveInt, Session, SessionResult, Status, TaskSpec

PlainText = Annotated[str, msgspec.Meta(pattern=r"^[^\x00]*$", max_length=2048)]
"""What both databases can hold in a column."""


class SessionState(StrEnum):
    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"


class GroupState(StrEnum):
    """``open`` until the last session ended; then why there is nothing more to come."""

    OPEN = "open"
    COMPLETED = "completed"
    STOPPED = "stopped"
    """``early_stop`` was reached."""
    CANCELLED = "cancelled"


class NodeState(StrEnum):
    LIVE = "live"
    SUSPECT = "suspect"
    """Somebody saw an error there: it gets no work until it renews."""
    DRAINING = "draining"
    """Ends what it has and gets nothing new."""
    GONE = "gone"
    """Left, or its lease ran out. It must register again, as another epoch."""


class Outcome(StrEnum):
    """What became of a completion."""

    ACCEPTED = "accepted"
    """It is the session's result."""
    REQUEUED = "requeued"
    """An infrastructure failure: the session will run again."""
    REPEATED = "repeated"
    """The same attempt was reported before; what was decided then holds."""
    FENCED = "fenced"
    """Another attempt holds the session, or none: nothing was kept."""


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    task: TaskView
    created: bool
    """False: it was there before."""


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    """A task without its spec. ``queued + leased + done == num_samples``."""

    task_id: str
    cursor: int
    """Order of submission; pages of tasks are cut by it."""
    state: GroupState
    num_samples: int
    priority: int
    queued: int
    leased: int
    done: int
    scored: int
    """Sessions that ended otherwise than by cancellation or an infrastructure failure."""
    ended: bool
    created_at: float
    """Unix seconds, for people; nothing is ordered by it."""


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    task_id: str
    sample_index: int
    state: SessionState
    attempt: int
    """0: never given out."""
    node: str | None
    """Who has it, or had it last."""
    cancelled: bool
    """Somebody asked for its end; a node that has it still may report."""
    failures: int
    """Infrastructure failures that nodes reported."""
    losses: int
    """Times that its node was lost with it."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One lease, as a node names it."""

    session_id: str
    attempt: int


class NodeHello(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says when it joins."""

    node: Identifier
    epoch: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    """Higher in each life of the node, e.g. nanoseconds of its wall clock: what it held in an earlier one is given to others,
    and a request that an earlier one sent is known for what it is, whenever it arrives."""
    capacity: PositiveInt
    model: PlainText = ""
    """The policy that its engine serves; empty: the only one."""
    url: PlainText = ""
    labels: dict[PlainText, PlainText] = {}


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    accepted: bool
    """False: ``epoch`` or a later one was there before. Come again with a higher one."""
    epoch: int
    """The highest that the node ever had."""
    taken_back: Expiry


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    epoch: int
    state: NodeState
    capacity: int
    model: str
    url: str
    labels: dict[str, str]
    leased: int
    lease_until: float


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a heartbeat."""

    known: bool
    """False: this epoch of the node holds nothing any more; stop everything and register again."""
    stale: bool = False
    """A later heartbeat was answered before: this one renewed nothing."""
    lost: list[Held] = []
    """Of those that it named: not its own any more, to be stopped."""
    cancel: list[Held] = []
    """Its own, to be ended and reported."""
    dropped: list[str] = []
    """Sessions that it had and did not name: given to others."""
    draining: bool = False


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    known: bool
    sessions: list[Session] = []
    """Leased to the node, each with its new attempt."""
    state: NodeState = NodeState.LIVE


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, by the node that had it."""

    node: str
    result: SessionResult
    retry: bool = False
    """An infrastructure failure that another attempt may not meet."""
    trajectory: PlainText | None = None
    """Where its rows are; a reference, never the rows."""


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    cancel: list[Held] = []
    """Leases that this completion made pointless (``early_stop``)."""


class Expiry(msgspec.Struct, frozen=True, kw_only=True):
    gone: list[str] = []
    """Nodes whose lease ran out."""
    requeued: list[str] = []
    """Sessions that wait again."""
    ended: list[str] = []
    """Sessions that ended instead: cancelled, or lost too often."""


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    ended: int = 0
    """Sessions that waited and are over."""
    told: list[Held] = []
    """Sessions whose nodes are told at their next heartbeat."""


class GroupEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The one event after which nothing of a task will come."""

    task_id: str
    state: GroupState
    num_samples: int
    statuses: dict[str, int]
    """Status → sessions; their sum is ``num_samples``."""


class DeliveryKind(StrEnum):
    SESSION = "session"
    GROUP = "group"


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """Something to be told once. ``result`` or ``group`` is set, by ``kind``."""

    cursor: int
    """Rises by one with each delivery of the registry."""
    delivery_id: str
    kind: DeliveryKind
    task_id: str
    acked: bool
    result: SessionResult | None = None
    group: GroupEnd | None = None
    trajectory: str | None = None


class Callback(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery that is owed to a URL."""

    delivery_id: str
    url: str
    tries: int
    """Failures so far."""
    delivery: Delivery


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of one engine or model. ``model`` empty: the only one."""

    model: str
    version: str | None = None
    paused: bool = False
    """While weights are changed: nothing new is given to its nodes."""


class TokenKind(StrEnum):
    """Never interchangeable."""

    USER = "user"
    NODE = "node"
    SESSION = "session"
    EVALUATOR = "evaluator"
    ADMIN = "admin"


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A credential, without its secret."""

    kid: str
    kind: TokenKind
    digest: str
    """Hex SHA-256 of the whole token."""
    subject: str
    """Who has it: a user, a node, or a session's id."""
    attempt: int | None = None
    """Of a session or evaluator token: valid while this attempt holds the lease, and no longer."""
    revoked: bool = False


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    queued: int = 0
    leased: int = 0
    done: int = 0
    tasks: int = 0
    deliveries: int = 0


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What was found at the start: all of it goes on."""

    counts: Counts
    nodes: list[str]
    """They have one lease time to renew."""
    callbacks: int


class Registry(Protocol):
    """Durable state of a rollout server. All methods may raise RegistryUnavailable; then they may be called again as they are."""

    async def start(self, now: float, lease: float) -> Recovery:
        """Begin a life of the server at ``now`` of its clock: what was leased stays leased for one more ``lease``. Nothing is
        open when it fails, and it may be tried again. Raises RegistryInUse too, and RegistryError for another schema."""
        ...

    async def close(self) -> None: ...

    async def submit(self, task: TaskSpec, *, max_queued: int | None = None) -> Submitted:
        """Keep a task with its sessions. Raises TaskConflict for its id with another spec, QueueFull when more than
        ``max_queued`` sessions wait (never for a task that is there already)."""
        ...

    async def task(self, task_id: str) -> TaskView:
        """Raises UnknownRecord."""
        ...

    async def spec(self, task_id: str) -> TaskSpec:
        """Raises UnknownRecord."""
        ...

    async def tasks(self, cursor: int = 0, limit: int = 100) -> list[TaskView]:
        """Those after ``cursor``, in order of submission."""
        ...

    async def session(self, session_id: str) -> SessionView:
        """Raises UnknownRecord."""
        ...

    async def sessions(self, task_id: str) -> list[SessionView]:
        """By sample index; raises UnknownRecord."""
        ...

    async def cancel_task(self, task_id: str) -> Cancelled:
        """Once: what waits is over, what runs is told to end. Nothing of an ended task. Raises UnknownRecord."""
        ...

    async def cancel_session(self, session_id: str) -> Cancelled:
        """Raises UnknownRecord."""
        ...

    async def register(self, hello: NodeHello, now: float, lease: float) -> Registered:
        """A node joins, or comes back. Of an earlier epoch of it everything is lost; the same one again is a repeated request."""
        ...

    async def claim(
        self, node: str, epoch: int, slots: int, now: float, lease: float, *, max_leased: int | None = None
    ) -> Claimed:
        """Give up to ``slots`` sessions: highest priority first, then the oldest task, so that groups already begun are ended
        before others are begun."""
        ...

    async def renew(self, node: str, epoch: int, beat: int, held: list[Held], now: float, lease: float) -> Renewal:
        """A heartbeat. ``beat`` rises with each that the node makes; ``held`` is all that it has or has yet to report."""
        ...

    async def complete(self, completion: Completion) -> Completed:
        """The end of an attempt. Raises UnknownRecord for a session that never was."""
        ...

    async def expire(self, now: float) -> Expiry:
        """Take back what was not renewed in time."""
        ...

    async def suspect(self, node: str, until: float) -> bool:
        """An error was seen at a node: its lease ends at ``until`` unless it renews. False: not known, or gone."""
        ...

    async def drain(self, node: str) -> bool:
        """No more work for it. False: not known, or gone."""
        ...

    async def leave(self, node: str, epoch: int | None = None) -> Expiry:
        """A node ended, or is known to be dead: what it had waits again. ``epoch`` None: whichever it is."""
        ...

    async def nodes(self) -> list[NodeView]:
        """By name, those that are gone too."""
        ...

    async def results(
        self, cursor: int = 0, limit: int = 100, *, task_id: str | None = None, acked: bool = False
    ) -> list[Delivery]:
        """Deliveries after ``cursor``, in order; ``acked``: those that were acknowledged too."""
        ...

    async def ack(self, delivery_id: str) -> bool:
        """True the first time. Raises UnknownRecord."""
        ...

    async def callbacks(self, now: float, limit: int = 100) -> list[Callback]:
        """Those that are due."""
        ...

    async def callback_sent(self, delivery_id: str) -> None: ...

    async def callback_failed(self, delivery_id: str, error: str, retry_at: float | None) -> None:
        """``retry_at`` None: give it up; the result can still be pulled."""
        ...

    async def policies(self) -> list[Policy]: ...

    async def set_policy(self, model: str, *, version: str | None = None, paused: bool | None = None) -> Policy:
        """None leaves a value as it is."""
        ...

    async def add_token(self, record: TokenRecord) -> None: ...

    async def token(self, kid: str) -> TokenRecord | None:
        """None when unknown, revoked, or of an attempt that does not hold its session's lease."""
        ...

    async def revoke_token(self, kid: str) -> bool: ...

    async def counts(self) -> Counts: ...


def json_of(value: Any) -> str:
    """The text form of a record in a column."""
    return msgspec.json.encode(value).decode()


def infra(kind: str, message: str, fix: str = "") -> ErrorInfo:
    """An end that a node did not report."""
    return ErrorInfo(kind=kind, boundary="registry", message=message, fix=fix)


UNSCORED = frozenset((Status.INFRA_ERROR, Status.CANCELLED))
"""They carry no reward and do not count for ``early_stop``."""
