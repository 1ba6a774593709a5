"""The bench itself, with settings so small that its figures mean nothing. Speed is asserted nowhere."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from polynya.bench.gateway import differences as report_differences
from polynya.bench.gateway import gateway_report
from polynya.bench.hosted import differences
from polynya.bench.measure import Options
from polynya.bench.report import grids, markdown
from polynya.bench.workload import Call, Spec, Workload
from polynya.capture.journal import Journal
from polynya.capture.store import CallEnd, CallStart, CaptureStore, SessionCapture
from polynya.cli import bench as verb
from polynya.cli.main import app
from polynya.schema import Lane

_TINY = Options(
    seconds=0.2,
    rounds=1,
    connections=2,
    sampled=16,
    contenders=("polynya", "pass"),
    agents=4,
    upstream_seconds=0.1,
    held=1,
)


async def test_report_has_every_figure_and_is_exact(tmp_path: Path) -> None:
    said: list[str] = []
    report = await gateway_report(["2k"], ["agents", "exact"], _TINY, tmp_path, said.append)
    assert (report["exact"], report["differences"]) == (True, {})
    ours = report["sizes"][0]["contenders"]["polynya"]
    assert ours["cpu_us"] > 0 and ours["failures"] == 0 and ours["peak_rss"] > 1e6
    assert ours["upstream_calls_per_request"] == 1.0 and ours["stalls_paced"]["ticks"] > 0
    assert ours["check"]["calls"] > 4
    agents = report["extras"]["agents"]["contenders"]["polynya"]
    assert (agents["most_in_flight"], agents["answered"], agents["makespan"] >= 0.1) == (4, 4, True)
    exact = report["extras"]["exact"]
    assert (exact["requests"], exact["check"]) == (24, {"calls": 25, "differences": {}})
    assert report["sizes"][0]["contenders"]["pass"]["cpu_us"] >= 0
    text = markdown(report)
    assert "| polynya | whole hop, durable |" in text and "NOT EXACT" not in text
    assert said[0].startswith("2k: polynya, pass")


async def test_contender_that_is_not_there_is_a_row_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYNYA_CACHE", str(tmp_path / "empty"))
    options = msgspec.structs.replace(_TINY, contenders=("polynya", "vllm-router"))
    report = await gateway_report(["2k"], [], options, tmp_path / "work", lambda line: None)
    assert report["exact"] is True
    assert report["sizes"][0]["contenders"]["vllm-router"] == {
        "missing": "not installed; polynya bench gateway --install"
    }
    assert "--install" in grids(report)[0].notes[0]


async def _captured(folder: Path, spec: Spec, change: Any) -> SessionCapture:
    """One call of session 0 as the gateway would capture it, after ``change`` had its way with what the engine said."""
    expected = Workload(spec).variant(0).expected(Call(0, 0, 0))
    end = CallEnd(
        outcome="ok", prompt_ids=expected.prompt, sampled_ids=expected.sampled.copy(), logprobs=expected.logprobs.copy()
    )
    journal = Journal(folder)
    journal.start()
    store = CaptureStore(journal, lambda: 0.0)
    capture = await store.open_session("bench.0", 1)
    call = await store.begin(capture, CallStart(dialect="x", lane=Lane.MAIN, model="m", body_digest=b"", messages=[]))
    await store.finish(capture, call, change(end))
    store.delivered(capture, call)
    await journal.close()
    return capture


@pytest.mark.parametrize("field", ["", "prompt_ids", "sampled_ids", "logprobs"])
async def test_one_captured_value_that_differs_is_found(tmp_path: Path, field: str) -> None:
    def change(end: CallEnd) -> CallEnd:
        if field:
            getattr(end, field)[1] += 1
        return end

    spec = Spec(name="t", body_bytes=2_000, prompt_ids=50, sampled=8, turns=2)
    found = differences(Workload(spec), 0, await _captured(tmp_path, spec, change))
    assert dict(found) == ({field: 1} if field else {})


async def test_call_that_was_cut_short_is_found(tmp_path: Path) -> None:
    spec = Spec(name="t", body_bytes=2_000, prompt_ids=50, sampled=8, turns=2)
    capture = await _captured(
        tmp_path, spec, lambda end: msgspec.structs.replace(end, sampled_ids=end.sampled_ids[:-1])
    )
    assert differences(Workload(spec), 0, capture)["sampled_ids"] == 1
    assert np.array_equal(capture.calls[0].prompt_ids, Workload(spec).variant(0).expected(Call(0, 0, 0)).prompt)


def test_a_wrong_capture_a_failed_request_and_a_missing_gateway_are_differences() -> None:
    good = {"check": {"differences": {}}, "failures": 0}
    bad = {"check": {"differences": {"sampled_ids": 2}}, "failures": 0}
    sizes = [{"size": name, "contenders": {"polynya": row}} for name, row in (("2k", good), ("106k", bad))]
    extras = {
        "agents": {"check": None, "contenders": {"polynya": {"missing": "it ended"}}},
        "window": {"failures": {"HTTP 500": 1}},
    }
    found = report_differences({"sizes": sizes, "extras": extras})
    assert list(found) == ["106k", "agents", "window"]


@pytest.mark.parametrize(("exact", "code"), [(True, 0), (False, 1)])
def test_exit_code_says_whether_the_capture_was_exact(monkeypatch: pytest.MonkeyPatch, exact: bool, code: int) -> None:
    async def made(*args: Any) -> dict[str, Any]:
        machine = {"cpu": "x", "cores": 2, "python": "3", "date": "d", "fdatasync_ms": 1.0, "load": [0, 0, 0]}
        return {
            "machine": machine,
            "sizes": [],
            "extras": {},
            "differences": {} if exact else {"2k": "x"},
            "exact": exact,
        }

    monkeypatch.setattr(verb, "gateway_report", made)
    done = CliRunner().invoke(app, ["bench", "gateway"])
    assert done.exit_code == code
    assert ("NOT EXACT" in done.output) is not exact


@pytest.mark.parametrize("option", ["--sizes", "--with", "--extras"])
def test_unknown_name_is_bad_input_and_names_the_known_ones(option: str) -> None:
    done = CliRunner().invoke(app, ["bench", "gateway", option, "nonsense"])
    assert done.exit_code == 2 and "'nonsense' is unknown" in done.output
