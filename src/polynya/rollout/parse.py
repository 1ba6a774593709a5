"""One decoded mapping of a task file → ``TaskSpec``.

Refuses what the record does not have or cannot hold; each message names the field's path and its value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from polynya.errors import TaskFileError
from polynya.schema import TaskSpec

_EVALUATOR_OWN = {"name", "label", "weight", "settings"}
_PATH = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$")


def _evaluator(raw: Any, where: str) -> Any:
    if not isinstance(raw, Mapping):
        raise TaskFileError(f"{where}: {raw!r} is not a mapping", fix="write e.g. {name: command, command: pytest -q}")
    own = {key: value for key, value in raw.items() if key in _EVALUATOR_OWN}
    rest = {key: value for key, value in raw.items() if key not in _EVALUATOR_OWN}
    settings = own.get("settings", {})
    if not isinstance(settings, Mapping):
        raise TaskFileError(f"{where}.settings: {settings!r:.120} is not a mapping", fix="write {setting: value, …}")
    own["settings"] = {**settings, **rest}
    return own


def parse_task(raw: Any, where: str) -> TaskSpec:
    """Turn one decoded mapping into a TaskSpec.

    ``where`` (file and position) starts every message. Short forms are allowed: ``harness: pi`` for ``{name: pi}``,
    one evaluator instead of a list, evaluator settings beside its name. Raises TaskFileError naming field and value.
    """
    if not isinstance(raw, Mapping):
        raise TaskFileError(
            f"{where}: a task is a mapping, not {type(raw).__name__}", fix="see docs/tasks.md for the fields"
        )
    task = dict(raw)
    for key in ("harness", "builder", "runtime"):
        if isinstance(task.get(key), str):
            task[key] = {"name": task[key]}
    if "evaluator" in task:
        graders = task["evaluator"]
        if isinstance(graders, str):
            graders = {"name": graders}
        graders = graders if isinstance(graders, list) else [graders]
        task["evaluator"] = [_evaluator(item, f"{where}.evaluator[{i}]") for i, item in enumerate(graders)]
        if not graders:
            raise TaskFileError(
                f"{where}.evaluator: [] is empty", fix="leave it out for `completed`, or name an evaluator"
            )
    try:
        spec = msgspec.convert(task, TaskSpec, strict=True)
        msgspec.json.encode(spec)
    except msgspec.ValidationError as exc:
        raise _refused(str(exc), task, where) from exc
    except (TypeError, ValueError, RecursionError) as exc:
        raise TaskFileError(
            f"{where}: cannot be written as JSON: {exc}", fix="use texts, numbers, lists and mappings of them only"
        ) from exc
    if spec.early_stop is not None and spec.early_stop > spec.num_samples:
        raise TaskFileError(
            f"{where}.early_stop: {spec.early_stop} is more than num_samples ({spec.num_samples})",
            fix="leave it out, or make it smaller",
        )
    return spec


def _refused(text: str, task: dict[str, Any], where: str) -> TaskFileError:
    """The validator's words with path and value of the field that they are about."""
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    text = _PATH.sub("", text)
    if unknown := _UNKNOWN.search(text):
        path, text = f"{path}.{unknown.group(1)}", "there is no such field"
    value = _value_at(task, path)
    shown = "" if value is _ABSENT else f" (value {value!r:.120})"
    return TaskFileError(f"{where}{path}: {text}{shown}", fix="see docs/tasks.md for the fields")


_ABSENT = object()


def _value_at(root: Any, path: str) -> Any:
    for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        try:
            root = root[name] if name else root[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return _ABSENT
    return root
