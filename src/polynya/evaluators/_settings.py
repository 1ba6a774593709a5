"""Reads the settings of an evaluator strictly.

Invariant: a setting that is not declared, or has another type than declared, is TaskFileError with name, value and fix.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from polynya.errors import TaskFileError

T = TypeVar("T", bound=msgspec.Struct)


def read(name: str, settings: dict[str, Any], kind: type[T]) -> T:
    known = ", ".join(kind.__struct_fields__) or "none"
    for key, value in settings.items():
        if key not in kind.__struct_fields__:
            raise TaskFileError(
                f"evaluator.{key}: {name} does not know it (value {value!r:.120})", fix=f"known settings: {known}"
            )
    try:
        return msgspec.convert(settings, kind, strict=True)
    except msgspec.ValidationError as exc:
        raise TaskFileError(
            f"evaluator {name}: {exc} (value {settings!r:.200})", fix=f"known settings: {known}"
        ) from exc


def tail(*parts: bytes, size: int = 4000) -> str:
    """The end of what a grader printed, for ``Score.detail``."""
    return b"\n".join(part for part in parts if part)[-size:].decode(errors="replace").strip()
