"""Task files: the three shapes, defaults, and one clear refusal for everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from polynya.errors import TaskFileError
from polynya.rollout.parse import parse_task
from polynya.rollout.tasks import _from_document, _read, load_tasks, spec_digest
from polynya.schema import TaskSpec

TASK = {"task_id": "a", "instruction": "do it", "harness": "shell"}


def write(folder: Path, text: str, name: str = "tasks.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, document: Any, name: str = "tasks.yaml") -> list[TaskSpec]:
    return load_tasks([write(folder, yaml.safe_dump(document), name)])


def test_one_task_a_list_and_tasks_with_defaults_are_read(tmp_path: Path) -> None:
    (one,) = load(tmp_path, TASK)
    (same,) = load(tmp_path, [TASK])
    (again,) = load(tmp_path, {"defaults": {"harness": "shell"}, "tasks": [{"task_id": "a", "instruction": "do it"}]})
    assert one == same == again


def test_jsonl_has_one_task_a_line(tmp_path: Path) -> None:
    # JSON may hold line separators of Unicode as they are; they end no line of the file.
    odd = {**TASK, "task_id": "b", "instruction": "one\u2028two\x85three"}
    lines = [json.dumps(TASK), "", json.dumps(odd, ensure_ascii=False)]
    tasks = load_tasks([write(tmp_path, "\ufeff" + "\r\n".join(lines) + "\n", "tasks.jsonl")])
    assert [(task.task_id, task.instruction) for task in tasks] == [("a", "do it"), ("b", "one\u2028two\x85three")]


def test_files_are_read_in_order(tmp_path: Path) -> None:
    first = write(tmp_path, yaml.safe_dump({**TASK, "task_id": "z"}), "1.yaml")
    second = write(tmp_path, json.dumps(TASK), "2.jsonl")
    assert [task.task_id for task in load_tasks([first, second])] == ["z", "a"]


def test_defaults_are_merged_key_by_key_and_the_task_wins(tmp_path: Path) -> None:
    defaults = {
        "harness": {"name": "shell", "settings": {"command": "x"}},
        "runtime": "local",
        "budgets": {"run": 5, "calls": 3},
        "sampling": {"temperature": 0.5},
        "metadata": {"of": "all", "both": 1},
        "evaluator": "completed",
        "num_samples": 4,
    }
    own = {
        "task_id": "a",
        "instruction": "do it",
        "runtime": {"files": {"f": "x"}},
        "budgets": {"run": 7},
        "metadata": {"both": 2},
        "evaluator": {"name": "command", "command": "true"},
        "num_samples": 1,
    }
    task, plain = load(tmp_path, {"defaults": defaults, "tasks": [own, {"task_id": "b", "instruction": "x"}]})
    assert (task.runtime.name, task.runtime.files) == ("local", {"f": "x"})
    assert (task.budgets.run, task.budgets.calls, task.sampling.temperature) == (7, 3, 0.5)
    assert task.metadata == {"of": "all", "both": 2}
    assert ([spec.name for spec in task.evaluator], task.num_samples) == (["command"], 1)
    assert (plain.runtime.name, plain.num_samples, plain.metadata) == ("local", 4, {"of": "all", "both": 1})


def test_short_runtime_of_a_task_keeps_the_other_defaults(tmp_path: Path) -> None:
    document = {"defaults": {"runtime": {"name": "bubblewrap", "cpus": 2}}, "tasks": [{**TASK, "runtime": "local"}]}
    (task,) = load(tmp_path, document)
    assert (task.runtime.name, task.runtime.cpus) == ("local", 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["tasks.yaml: holds NoneType"]),
        ("[]", ["no task in the given files"]),
        ("tasks: []", ["no task in the given files"]),
        ("5", ["tasks.yaml: holds int"]),
        ("just words", ["tasks.yaml: holds str"]),
        ("tasks: 5", ["tasks.yaml: `tasks` must be a list"]),
        ("tasks: [5]", ["tasks.yaml.tasks[0]: a task is a mapping, not int"]),
        ("{tasks: [], zzz: 1, 1: 2, null: 3}", ["tasks.yaml: unknown field 1 beside `tasks`"]),
        ("a: [1", ["tasks.yaml:1:", "not YAML"]),
        ("a: b: c", ["tasks.yaml:1:", "not YAML", "mapping values"]),
        ("a: \x07", ["tasks.yaml: not YAML"]),
        ("a: 2001-13-45", ["tasks.yaml: a value cannot be read", "month"]),
        ("a: !!bool maybe", ["tasks.yaml: a value cannot be read"]),
        ("a: !!timestamp x", ["tasks.yaml: a value cannot be read"]),
        ("a: !secret x", ["tasks.yaml:1:4", "!secret"]),
        ("[" * 3000, ["tasks.yaml: a value cannot be read", "RecursionError"]),
        ("&a [*a]", ["tasks.yaml[0]: a task is a mapping, not list"]),
        ("- {task_id: a, instruction: x, harness: shell}\n- {task_id: b}", ["tasks.yaml[1]", "missing required field"]),
    ],
)
def test_file_that_holds_no_tasks_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(TaskFileError) as caught:
        load_tasks([write(tmp_path, text)])
    assert [word for word in words if word not in caught.value.message] == []
    assert caught.value.fix


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["tasks.jsonl:2: not JSON"]),
        ("5", ["tasks.jsonl:2: a task is a mapping"]),
        ("[" * 100_000, ["tasks.jsonl:2: not JSON", "recursion"]),
        ('{"task_id": "b", "instruction": "x", "harness": "shell", "samples": 3}', ["tasks.jsonl:2.samples", "(value 3)"]),
        (json.dumps(TASK), ["tasks.jsonl:2.task_id: 'a' was used before, in", "tasks.jsonl:1"]),
    ],
    ids=["cut", "number", "deep", "unknown", "twice"],
)  # fmt: skip
def test_line_that_holds_no_task_is_refused(tmp_path: Path, line: str, words: list[str]) -> None:
    with pytest.raises(TaskFileError) as caught:
        load_tasks([write(tmp_path, json.dumps(TASK) + "\n" + line, "tasks.jsonl")])
    assert [word for word in words if word not in caught.value.message] == []


def test_one_id_in_two_files_is_refused(tmp_path: Path) -> None:
    first, second = (write(tmp_path, yaml.safe_dump(TASK), name) for name in ("1.yaml", "2.yaml"))
    with pytest.raises(TaskFileError, match=r"2\.yaml\.task_id: 'a' was used before, in .*1\.yaml"):
        load_tasks([first, second])


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"missing\.yaml: No such file"):
        load_tasks([tmp_path / "missing.yaml"])
    with pytest.raises(TaskFileError, match="Is a directory"):
        load_tasks([tmp_path])
    (tmp_path / "latin.yaml").write_bytes(b"instruction: caf\xe9\n")
    with pytest.raises(TaskFileError, match=r"latin\.yaml: not UTF-8 text"):
        load_tasks([tmp_path / "latin.yaml"])


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just(TASK),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tasks", "defaults", "runtime", "budgets", "task_id"]) | st.integers(), inner
        )
    ),
    max_leaves=10,
)


@given(DOCUMENTS)
def test_any_document_is_tasks_or_a_refusal(document: Any) -> None:
    try:
        found = [parse_task(raw, where) for where, raw in _from_document(document, "f")]
    except TaskFileError as exc:
        assert exc.message.startswith("f")
        return
    assert all(isinstance(task, TaskSpec) for task in found)


@given(st.text(alphabet="abt:[]{}&*!|>-?#'\"%@\n \\0129.,~", max_size=40), st.sampled_from(["x.yaml", "x.jsonl"]))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str, name: str) -> None:
    path = write(tmp_path_factory.getbasetemp(), text, name)
    try:
        found = _read(path)
    except TaskFileError as exc:
        assert str(path) in exc.message
        return
    assert isinstance(found, list)


def test_digest_follows_everything_but_how_many_samples_there_are_and_when_they_run() -> None:
    task = parse_task(TASK, "x")
    scheduled = msgspec.structs.replace(task, priority=3, max_concurrent=2, early_stop=1)
    assert spec_digest(task) == spec_digest(scheduled)
    more = msgspec.structs.replace(task, num_samples=9)
    other = msgspec.structs.replace(task, instruction="else")
    assert spec_digest(task) == spec_digest(more) != spec_digest(other)
