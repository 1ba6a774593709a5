"""1 when the harness ended well, else 0. Looks at nothing but how the run ended; refuses every setting."""

from __future__ import annotations

from typing import Any

import msgspec

from polynya.evaluators import _settings
from polynya.evaluators.base import EvalContext
from polynya.schema import Score, Status


class CompletedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Completed:
    name = "completed"

    def validate(self, settings: dict[str, Any]) -> None:
        _settings.read(self.name, settings, CompletedSettings)

    async def evaluate(self, settings: dict[str, Any], context: EvalContext) -> Score:
        done = context.outcome.status is Status.COMPLETED
        return Score(name=self.name, value=1.0 if done else 0.0, detail=f"status {context.outcome.status.value}")
