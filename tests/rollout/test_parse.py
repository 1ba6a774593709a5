"""Reading one task: short forms, what is refused and in which words, and that nothing else ever comes out."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.errors import TaskFileError
from polynya.rollout.parse import parse_task
from polynya.schema import EvaluatorSpec, TaskSpec

TASK = {"task_id": "a", "instruction": "do it", "harness": "shell"}
FIELDS = sorted(TaskSpec.__struct_fields__)
PARTS = ["name", "settings", "weight", "label", "files", "env", "run", "init", "policy", "temperature", "url", "repo", "cpus"]  # fmt: skip

KEYS = st.sampled_from([*FIELDS, *PARTS]) | st.text(max_size=4) | st.integers() | st.none() | st.booleans()
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["local", "shell", "a\0b", "\ud800", "x\n"])
    | st.text(max_size=8) | st.binary(max_size=4) | st.dates() | st.datetimes()
)  # fmt: skip
DECODED = st.recursive(
    SCALARS | st.sets(st.integers(), max_size=3) | st.tuples(st.integers(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
"""What JSON or YAML can decode to, often nearly a task."""


def task(**fields: Any) -> TaskSpec:
    return parse_task({**TASK, **fields}, "tasks.yaml")


def refusal(**fields: Any) -> str:
    with pytest.raises(TaskFileError) as caught:
        task(**fields)
    assert caught.value.fix
    return caught.value.message


@given(DECODED)
def test_anything_decoded_is_a_task_or_a_refusal(raw: Any) -> None:
    task_or_refusal(raw)


@given(st.dictionaries(st.sampled_from(FIELDS), DECODED, max_size=4))
def test_any_value_of_any_field_is_a_task_or_a_refusal(fields: dict[str, Any]) -> None:
    task_or_refusal({**TASK, **fields})


def task_or_refusal(raw: Any) -> None:
    try:
        found = parse_task(raw, "tasks.yaml")
    except TaskFileError as exc:
        assert exc.message.startswith("tasks.yaml")
        return
    assert isinstance(found, TaskSpec)


def test_short_forms_mean_the_long_ones() -> None:
    short = task(harness="pi", runtime="local", builder="per_request", evaluator="completed")
    long = task(
        harness={"name": "pi"},
        runtime={"name": "local"},
        builder={"name": "per_request"},
        evaluator=[{"name": "completed", "weight": 1.0, "label": "", "settings": {}}],
    )
    assert short == long


def test_evaluator_settings_may_stand_beside_its_name() -> None:
    found = task(evaluator=[{"name": "command", "command": "pytest", "weight": 2, "settings": {"timeout": 5}}])
    assert found.evaluator == [EvaluatorSpec(name="command", weight=2, settings={"timeout": 5, "command": "pytest"})]


def test_defaults_are_those_of_the_documentation() -> None:
    found = task()
    assert (found.num_samples, found.retries, found.runtime.name, found.runtime.network) == (1, 1, None, "gateway-only")
    assert [spec.name for spec in found.evaluator] == ["completed"]
    assert (found.priority, found.max_concurrent, found.early_stop, found.callback) == (0, None, None, None)
    assert (found.budgets.init, found.budgets.run, found.budgets.postrun) == (300, 900, 300)


def test_parsing_does_not_change_what_it_was_given() -> None:
    raw = {**TASK, "evaluator": {"name": "command", "command": "x"}, "runtime": "local"}
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    parse_task(raw, "x")
    assert raw == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"instrution": "hi"}, ["tasks.yaml.instrution: there is no such field", "(value 'hi')"]),
        ({"budgets": {"runn": 5}}, ["tasks.yaml.budgets.runn: there is no such field", "(value 5)"]),
        ({"runtime": {"repo": {"uri": "x"}}}, ["tasks.yaml.runtime.repo.uri: there is no such field", "'x'"]),
        ({"num_samples": 0}, ["tasks.yaml.num_samples", ">= 1", "(value 0)"]),
        ({"num_samples": "3"}, ["tasks.yaml.num_samples", "Expected `int`, got `str`", "(value '3')"]),
        ({"num_samples": True}, ["tasks.yaml.num_samples", "(value True)"]),
        ({"instruction": ""}, ["tasks.yaml.instruction", "length >= 1"]),
        ({"instruction": "a\0b"}, ["tasks.yaml.instruction"]),
        ({"task_id": "a/b"}, ["tasks.yaml.task_id", "(value 'a/b')"]),
        ({"task_id": "../x"}, ["tasks.yaml.task_id"]),
        ({"task_id": "a\n"}, ["tasks.yaml.task_id"]),
        ({"task_id": 7}, ["tasks.yaml.task_id", "(value 7)"]),
        ({"harness": 5}, ["tasks.yaml.harness", "(value 5)"]),
        ({"harness": {"name": "x", "env": {"A=B": "c"}}}, ["tasks.yaml.harness.env"]),
        ({"runtime": {"workdir": "relative"}}, ["tasks.yaml.runtime.workdir", "(value 'relative')"]),
        ({"runtime": {"env": {"A": "\0"}}}, ["tasks.yaml.runtime.env"]),
        ({"runtime": {"files": {"a": 1}}}, ["tasks.yaml.runtime.files", "Expected `str`, got `int`"]),
        ({"runtime": {"network": "wide"}}, ["tasks.yaml.runtime.network", "'wide'"]),
        ({"budgets": {"run": 0}}, ["tasks.yaml.budgets.run", "(value 0)"]),
        ({"budgets": {"run": float("inf")}}, ["tasks.yaml.budgets.run", "(value inf)"]),
        ({"sampling": {"temperature": 9}}, ["tasks.yaml.sampling.temperature", "(value 9)"]),
        ({"evaluator": []}, ["tasks.yaml.evaluator: [] is empty"]),
        ({"evaluator": [5]}, ["tasks.yaml.evaluator[0]: 5 is not a mapping"]),
        ({"evaluator": {"name": "x", "settings": 5}}, ["tasks.yaml.evaluator[0].settings: 5 is not a mapping"]),
        ({"evaluator": [{"name": "x"}, {"weight": 1}]}, ["tasks.yaml.evaluator[1]", "missing required field `name`"]),
        ({"evaluator": {"name": "x", "weight": -1}}, ["tasks.yaml.evaluator[0].weight", "(value -1)"]),
        ({"priority": 1.5}, ["tasks.yaml.priority", "(value 1.5)"]),
        ({"priority": 10**9}, ["tasks.yaml.priority", "(value 1000000000)"]),
        ({"max_concurrent": 0}, ["tasks.yaml.max_concurrent", "(value 0)"]),
        ({"early_stop": 0}, ["tasks.yaml.early_stop", "(value 0)"]),
        ({"early_stop": 3, "num_samples": 2}, ["tasks.yaml.early_stop: 3 is more than num_samples (2)"]),
        ({"callback": "ftp://x/"}, ["tasks.yaml.callback", "(value 'ftp://x/')"]),
        ({"callback": "http://x/\0"}, ["tasks.yaml.callback"]),
        ({"callback": "http://x/ y"}, ["tasks.yaml.callback"]),
        ({"callback": "http://x/" + "y" * 2048}, ["tasks.yaml.callback"]),
        ({"metadata": {1: 2}}, ["tasks.yaml.metadata"]),
        ({"metadata": {"x": {(1, 2): 3}}}, ["tasks.yaml: cannot be written as JSON"]),
        ({"instruction": "\ud800"}, ["tasks.yaml: cannot be written as JSON", "surrogates"]),
    ],
)
def test_refusal_names_field_and_value(fields: dict[str, Any], words: list[str]) -> None:
    message = refusal(**fields)
    assert [word for word in words if word not in message] == []


def test_missing_field_is_named() -> None:
    with pytest.raises(TaskFileError, match="missing required field `harness`"):
        parse_task({"task_id": "a", "instruction": "x"}, "here")


@pytest.mark.parametrize("raw", [None, 5, "text", [], [TASK]])
def test_what_is_no_mapping_is_no_task(raw: Any) -> None:
    with pytest.raises(TaskFileError, match=r"here: a task is a mapping, not \w+"):
        parse_task(raw, "here")


def test_mapping_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    assert "cannot be written as JSON" in refusal(metadata=loop)


def test_metadata_may_hold_what_json_can_say() -> None:
    found = task(metadata={"when": datetime.date(2020, 1, 2), "n": [1, None, {"x": 1.5}]})
    assert found.metadata["n"] == [1, None, {"x": 1.5}]
