"""``render``: the page holds what the run directory holds, exactly, and nothing in it can run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from polynya.errors import RunDirError
from polynya.viewer import load, render
from polynya.viewer.pack import shorten_messages
from polynya.viewer.page import json_for_html


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.code: list[str] = []
        self._inside: tuple[str, dict[str, str | None]] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = (tag, dict(attrs)) if tag in ("script", "style", "title") else None

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            return
        tag, attributes = self._inside
        name = attributes.get("id") or tag
        self.texts[name] = self.texts.get(name, "") + data
        if tag == "script" and "type" not in attributes:
            self.code.append(data)

    @property
    def index(self) -> Any:
        return json.loads(self.texts["index"])

    def block(self, number: int) -> bytes:
        return zlib.decompress(base64.b64decode(self.texts[f"b{number}"]))

    def detail(self, session_id: str) -> Any:
        row = next(row for row in self.index["sessions"] if row["id"] == session_id)
        return json.loads(self.block(row["block"]))


def page_of(run_dir: Path, **options: Any) -> Parsed:
    return Parsed(render(run_dir, **options).read_text("utf-8"))


def tokens_of(blob: bytes, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What base.js does, in numpy."""
    words = np.ascontiguousarray(np.frombuffer(blob, np.uint8).reshape(4, -1).T).view("<i4").ravel()
    runs = int(words[0])
    spans = words[1 : 1 + 2 * runs].reshape(-1, 2)
    ids = words[1 + 2 * runs : 1 + 2 * runs + length]
    mask = np.zeros(length, np.uint8)
    for start, end in spans:
        mask[start:end] = 1
    logprobs = np.zeros(length, np.float32)
    logprobs[mask == 1] = words[1 + 2 * runs + length :].view("<f4")
    return ids, mask, logprobs


def test_the_page_lies_in_the_run_directory_or_where_asked(run_dir: Path, tmp_path: Path) -> None:
    assert render(run_dir) == run_dir / "view.html"
    other = tmp_path / "other.html"
    assert render(run_dir, other) == other and other.read_text().startswith("<!doctype html>")
    assert render(run_dir, tmp_path) == tmp_path / "view.html"
    left_behind = [p.name for p in [*run_dir.iterdir(), *tmp_path.iterdir()] if p.name.endswith(".tmp")]
    assert left_behind == []


def test_an_output_that_cannot_be_written_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirError) as caught:
        render(run_dir, tmp_path / "absent" / "x.html")
    assert "absent" in str(caught.value) and caught.value.fix
    with pytest.raises(RunDirError):
        render(tmp_path / "nothing")


def test_tokens_are_embedded_bit_for_bit(run_dir: Path) -> None:
    page = page_of(run_dir)
    table = pq.read_table(run_dir / "traces.parquet").to_pylist()
    assert table
    for row in table:
        trace = page.detail(row["session_id"])["traces"][0]
        ids, mask, logprobs = tokens_of(page.block(trace["block"]), trace["length"])
        assert ids.tolist() == row["input_ids"] and mask.tolist() == row["loss_mask"]
        assert logprobs.tobytes() == np.array(row["logprobs"], np.float32).tobytes()
        assert trace["trained"] == sum(row["loss_mask"])


def test_a_trace_of_35000_tokens_stays_small(tmp_path: Path, make_run: Callable[..., Any]) -> None:
    make_run(tmp_path / "run", tasks=1, samples=1, long=35_000)
    page = page_of(tmp_path / "run")
    trace = page.detail("csv-last-row.0")["traces"][0]
    assert trace["length"] >= 35_000
    assert len(page.texts[f"b{trace['block']}"]) < 5 * trace["length"]


def test_rewards_that_are_null_stay_null(run_dir: Path) -> None:
    rows = page_of(run_dir).index["sessions"]
    by_id = {s.session_id: s.reward for s in load(run_dir).sessions}
    assert {row["id"]: row["reward"] for row in rows} == by_id
    assert None in by_id.values()


def test_the_policy_names_the_only_script_and_style(run_dir: Path) -> None:
    page = page_of(run_dir)
    policy = next(
        a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    for directive in (
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
    ):
        assert directive in policy
    assert "unsafe" not in policy and "http" not in policy
    assert len(page.code) == 1
    for text, name in ((page.code[0], "script-src"), (page.texts["style"], "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy


def test_nothing_is_loaded_from_outside(run_dir: Path) -> None:
    page = page_of(run_dir)
    for tag, attributes in page.tags:
        assert tag in {"html", "head", "meta", "title", "link", "style", "body", "main", "noscript", "script"}
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "data:").startswith("data:")
    code = page.code[0]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "fetch(",
                 "XMLHttpRequest", "import(", "localStorage", "document.cookie", "createContextualFragment"):  # fmt: skip
        assert word not in code
    assert not re.search(r"url\(|@import", page.texts["style"])


PAYLOADS = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "-->",
    "]]>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "javascript:alert(1)",
    '"><iframe src=javascript:alert(1)>',
    "'-alert(1)-'",
    "${alert(1)}",
    "\u2028alert(1)\u2029",
    "%%INDEX%%",
    "%%SCRIPT%%",
    "</title><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\x1b]8;;javascript:alert(1)\x07click\x1b]8;;\x07",
    "__proto__",
    "constructor",
]


def poison(run_dir: Path, payload: str) -> None:
    """Put ``payload`` everywhere that a run can put text."""
    run = json.loads((run_dir / "run.json").read_text())
    run |= {"run_id": payload, "command": payload, "engine": {"name": payload, payload: payload}, payload: payload}
    run["tasks"] = [{"task_id": payload, "instruction": payload, "num_samples": 2, "harness": {"name": payload}}]
    (run_dir / "run.json").write_text(json.dumps(run))
    lines = [json.loads(line) for line in (run_dir / "sessions.jsonl").read_text().splitlines()]
    for line in lines[:2]:
        line |= {
            "session_id": payload + line["session_id"],
            "task_id": payload,
            "status": "failed",
            "flags": {payload: 1},
        }
        line["error"] = {"kind": payload, "boundary": payload, "message": payload, "fix": payload}
        line["scores"] = [
            {"name": payload, "label": payload, "passed": [payload], "failed": [payload], "detail": payload}
        ]
        line["provenance"] |= {"engine": payload, "harness": payload, "model": payload, "sampling": {payload: payload}}
        line["ledger"]["excluded"] = {payload: 1}
        line["ledger"]["chain_breaks"] = {payload: 1}
        line["logs"] = {payload: line["logs"]["harness"]}
        (run_dir / line["logs"][payload]).write_text(payload)
    (run_dir / "sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    vocab = json.loads((run_dir / "vocab.json").read_text())
    (run_dir / "vocab.json").write_text(json.dumps(dict.fromkeys(vocab, payload)))
    for name in ("calls.parquet", "traces.parquet"):
        table = pq.read_table(run_dir / name)
        rows = table.to_pylist()
        owner = {lines[i]["session_id"].removeprefix(payload): lines[i]["session_id"] for i in range(2)}
        message = json.dumps([{"role": payload, "content": [{"type": payload, "text": payload}], "name": payload,
                               "tool_calls": [{"id": payload, "function": {"name": payload, "arguments": payload}}]}])  # fmt: skip
        poisoned = {"error", "finish_reason", "request", "reply", "flags", "lane", "dialect", "exclusion", "tools"}
        for row in rows:
            row["session_id"] = owner.get(row["session_id"], row["session_id"])
            row |= dict.fromkeys(poisoned & row.keys(), payload)
            if "messages" in row:
                row |= {"messages": message, "trace_id": payload}
                row["policy_spans"] = [span | {"version": payload} for span in row["policy_spans"]]
        pq.write_table(table.from_pylist(rows, schema=table.schema), run_dir / name)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_text_of_the_run_cannot_become_markup(run_dir: Path, payload: str) -> None:
    clean = page_of(run_dir)
    blocks = len([1 for t, a in clean.tags if t == "script"])
    poison(run_dir, payload)
    page = page_of(run_dir)
    kinds = [(tag, attributes.get("type")) for tag, attributes in page.tags if tag == "script"]
    assert len(kinds) == blocks and kinds.count(("script", None)) == 1
    assert page.code == clean.code and page.texts["style"] == clean.texts["style"]
    assert page.texts["title"] == f"polynya · {payload}"
    assert page.index["run"]["run_id"] == payload
    row = page.index["sessions"][0]
    assert row["error"]["message"] == payload
    detail = page.detail(row["id"])
    assert json.loads(detail["traces"][0]["messages"])[0]["content"][0]["text"] == payload
    assert "\x1b" not in detail["logs"][0]["text"]
    for text in (page.texts["index"], *(page.texts[name] for name in page.texts if re.fullmatch(r"b\d+", name))):
        assert not set(text) & set("<>&\u2028\u2029")


def test_escaped_json_is_the_same_json() -> None:
    value = {"<&>": "\u2028\u2029</script>", "n": [1, None, 0.5]}
    assert json.loads(json_for_html(value)) == value


# --- partial runs --------------------------------------------------------------------------------------------------


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(
        '{"run_id": "r", "finished_at": null, "tasks": [{"task_id": "a", "num_samples": 3}]}'
    )
    index = page_of(tmp_path).index
    assert index["sessions"] == [] and index["ledger"] is None
    assert {gap["name"] for gap in index["gaps"]} == {
        "sessions.jsonl",
        "calls.parquet",
        "traces.parquet",
        "ledger.json",
    }
    assert all(gap["state"] == "not yet" for gap in index["gaps"])
    assert index["tasks"]["a"]["num_samples"] == 3


def test_sessions_without_a_result_are_open(run_dir: Path) -> None:
    (run_dir / "sessions.jsonl").unlink()
    index = page_of(run_dir).index
    assert {row["status"] for row in index["sessions"]} == {"open"}
    row = next(row for row in index["sessions"] if row["id"] == "csv-last-row.1")
    assert row["task"] == "csv-last-row" and row["sample"] == 1 and row["calls"] > 0 and row["reward"] is None


def test_without_vocabulary_no_block_is_named(run_dir: Path) -> None:
    assert page_of(run_dir).index["vocab"] is not None
    (run_dir / "vocab.json").unlink()
    assert page_of(run_dir).index["vocab"] is None


def test_only_used_ids_of_the_vocabulary_are_embedded(run_dir: Path) -> None:
    vocab = json.loads((run_dir / "vocab.json").read_text())
    (run_dir / "vocab.json").write_text(
        json.dumps({**vocab, **{str(n): "unused" for n in range(1_000_000, 1_050_000)}})
    )
    page = page_of(run_dir)
    ids, texts = json.loads(page.block(page.index["vocab"]))
    assert len(ids) == len(texts) <= len(vocab) and "unused" not in texts


def test_a_misaligned_trace_is_a_problem_and_its_siblings_live(run_dir: Path, write_rows: Any) -> None:
    rows = pq.read_table(run_dir / "traces.parquet").to_pylist()
    rows[0]["logprobs"] = rows[0]["logprobs"][:-1]
    rows[1]["input_ids"] = None
    write_rows[1](run_dir / "traces.parquet", rows)
    page = page_of(run_dir)
    broken = page.detail(rows[0]["session_id"])["traces"][0]
    assert broken["block"] is None and "lengths differ" in broken["problem"]
    assert "null" in page.detail(rows[1]["session_id"])["traces"][0]["problem"]
    assert page.detail(rows[2]["session_id"])["traces"][0]["block"] is not None


def test_an_unbalanced_ledger_reaches_the_page_as_it_is(run_dir: Path) -> None:
    ledger = json.loads((run_dir / "ledger.json").read_text())
    ledger["total"]["captured"] += 5
    (run_dir / "ledger.json").write_text(json.dumps(ledger))
    shown = page_of(run_dir).index["ledger"]
    assert shown["captured"] == shown["trained"] + sum(shown["excluded"].values()) + 5


# --- the bound -----------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_named_errors_first(tmp_path: Path, make_run: Callable[..., Any]) -> None:
    make_run(tmp_path / "run", tasks=5, samples=4)
    index = page_of(tmp_path / "run", max_bytes=40_000).index
    data = load(tmp_path / "run")
    bad = {s.session_id for s in data.sessions if s.error is not None}
    inside = {row["id"] for row in index["sessions"] if row["block"] is not None}
    assert bad <= inside
    assert (
        set(index["left_out"]) | inside == {s.session_id for s in data.sessions} and not set(index["left_out"]) & inside
    )
    assert len(index["left_out"]) > 0 and index["cap"] == 40_000
    assert len(index["sessions"]) == 20, "every session keeps its row"
    last = data.sessions[-1].session_id
    assert last in index["left_out"]
    wanted = page_of(tmp_path / "run", max_bytes=40_000, sessions=[last, "unknown"]).index
    assert last not in wanted["left_out"] and "unknown" not in wanted["left_out"]


def test_nothing_fits(run_dir: Path) -> None:
    index = page_of(run_dir, max_bytes=0).index
    assert len(index["left_out"]) == len(index["sessions"]) == 9


def test_long_messages_are_cut_with_a_note() -> None:
    text = msgspec.json.encode(
        [{"role": "tool", "content": "x" * 900_000}, {"role": "user", "content": "short"}]
    ).decode()
    short = shorten_messages(text)
    assert short is not None and len(short) < 50_000
    assert "860,000 characters left out" in short and json.loads(short)[1]["content"] == "short"
    assert shorten_messages(None) is None and shorten_messages("[]") == "[]"
    assert shorten_messages("{" * 500_000) == "{" * 400_000
