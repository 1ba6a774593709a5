"""Task files: YAML (one task, a list, or ``{defaults, tasks}``) and JSONL (one task a line).

Refuses a task file with two tasks of one id, an empty one, and any field that TaskSpec does not have; each message names
the file, the position, the field and its value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from polynya.errors import TaskFileError
from polynya.rollout.parse import parse_task
from polynya.schema import TaskSpec

_MERGED = ("runtime", "budgets", "sampling", "metadata")
"""Mappings whose defaults are merged key by key; other fields are replaced."""

_SCHEDULING = ("priority", "max_concurrent", "early_stop")


def load_tasks(paths: Iterable[Path]) -> list[TaskSpec]:
    """All tasks of all files, in order. Raises TaskFileError."""
    tasks: dict[str, TaskSpec] = {}
    origin: dict[str, str] = {}
    for path in paths:
        for where, raw in _read(path):
            task = parse_task(raw, where)
            if task.task_id in tasks:
                raise TaskFileError(
                    f"{where}.task_id: {task.task_id!r} was used before, in {origin[task.task_id]}",
                    fix="give each task an id of its own",
                )
            tasks[task.task_id], origin[task.task_id] = task, where
    if not tasks:
        raise TaskFileError("no task in the given files", fix="see docs/tasks.md for an example")
    return list(tasks.values())


def refuse_served(tasks: Iterable[TaskSpec]) -> None:
    """A run of one process cannot do what these ask for, and does not act as if. Raises TaskFileError naming task and field."""
    for task in tasks:
        for field in ("callback", "early_stop", "max_concurrent"):
            value = getattr(task, field)
            if value is not None:
                raise TaskFileError(
                    f"task {task.task_id}: {field} {value!r} needs the rollout server",
                    fix="leave it out: all sessions run, and their results are in --out",
                )


def spec_digest(task: TaskSpec) -> str:
    """Changes when anything does that a session's result depends on: not how many there are, nor when they run."""
    bare = msgspec.to_builtins(msgspec.structs.replace(task, num_samples=1))
    for field in _SCHEDULING:
        del bare[field]
    return hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()


def _read(path: Path) -> list[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        raise TaskFileError(
            f"{path}: not UTF-8 text ({exc.reason} at byte {exc.start})", fix="save it as UTF-8"
        ) from exc
    except OSError as exc:
        raise TaskFileError(f"{path}: {exc.strerror}", fix="check the path of the task file") from exc
    if path.suffix in (".jsonl", ".ndjson"):
        return [
            (f"{path}:{i}", _json_line(line, f"{path}:{i}"))
            for i, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        at = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise TaskFileError(
            f"{at}: not YAML: {getattr(exc, 'problem', None) or exc}", fix="mind indentation and quotes"
        ) from exc
    except Exception as exc:  # the parser lets all sorts out for values that it cannot build: dates, tags, deep nesting
        raise TaskFileError(
            f"{path}: a value cannot be read: {type(exc).__name__}: {exc}", fix="put it between quotes"
        ) from exc
    return _from_document(document, str(path))


def _json_line(line: str, where: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise TaskFileError(f"{where}: not JSON: {exc}", fix="write one JSON object a line") from exc


def _from_document(document: Any, where: str) -> list[tuple[str, Any]]:
    if isinstance(document, list):
        return [(f"{where}[{i}]", raw) for i, raw in enumerate(document)]
    if not isinstance(document, dict):
        raise TaskFileError(
            f"{where}: holds {type(document).__name__}, no task", fix="write a mapping or a list of mappings"
        )
    if "tasks" not in document:
        return [(where, document)]
    if unknown := set(document) - {"tasks", "defaults"}:
        raise TaskFileError(
            f"{where}: unknown field {min(unknown, key=str)!r} beside `tasks`", fix="put shared fields under `defaults`"
        )
    tasks, defaults = document["tasks"], document.get("defaults") or {}
    if not isinstance(tasks, list) or not isinstance(defaults, dict):
        raise TaskFileError(f"{where}: `tasks` must be a list and `defaults` a mapping", fix="see docs/tasks.md")
    return [(f"{where}.tasks[{i}]", _with_defaults(raw, defaults)) for i, raw in enumerate(tasks)]


def _with_defaults(raw: Any, defaults: dict[str, Any]) -> Any:
    if not isinstance(raw, dict):
        return raw
    merged = {**defaults, **raw}
    for key in _MERGED:
        ours, theirs = (_long_form(key, fields.get(key)) for fields in (raw, defaults))
        if isinstance(ours, dict) and isinstance(theirs, dict):
            merged[key] = {**theirs, **ours}
    return merged


def _long_form(key: str, value: Any) -> Any:
    """``runtime: local`` is ``runtime: {name: local}``, so it keeps the other defaults."""
    return {"name": value} if key == "runtime" and isinstance(value, str) else value
