"""The page in a real Chromium, where one is on PATH: nothing of the run can run, and the tokens shown are the tokens.

Skipped where there is no browser or it does not start; the parser tests in test_render.py hold everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest

from polynya.viewer import load, render

PAYLOAD = "</script><img src=x onerror=alert(1)><script>alert(2)</script>\u2028"


def _driver() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "screenshots.py"
    spec = importlib.util.spec_from_file_location("polynya_screenshots", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRIVER = _driver()
pytestmark = pytest.mark.skipif(not any(map(shutil.which, DRIVER.BROWSERS)), reason="no Chromium on PATH")
Use = Callable[[Callable[[Any], Awaitable[None]]], Awaitable[None]]


@pytest.fixture
async def page() -> AsyncIterator[Any]:
    manager = DRIVER.browser()
    try:
        page = await manager.__aenter__()
    except (DRIVER.BrowserError, OSError) as error:
        pytest.skip(f"Chromium does not start here: {error}")
    try:
        await page.size(1300, 900, 1, dark=False)
        yield page
    finally:
        await manager.__aexit__(None, None, None)


async def text(page: Any, selector: str) -> str:
    return str(await page.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))


async def press(page: Any, key: str) -> None:
    await page.send("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": key} if len(key) == 1 else {}))
    await page.send("Input.dispatchKeyEvent", type="keyUp", key=key)


async def test_tokens_shown_are_the_tokens(page: Any, run_dir: Path) -> None:
    row = pq.read_table(run_dir / "traces.parquet").to_pylist()[0]
    vocab = json.loads((run_dir / "vocab.json").read_text())
    url = render(run_dir).as_uri()
    trained = [i for i, bit in enumerate(row["loss_mask"]) if bit]
    for i in (0, 3, trained[0], trained[7], trained[-1], len(row["input_ids"]) - 1):
        await page.open(f"{url}#{urlencode({'session': row['session_id'], 'trace': row['trace_id'], 'token': i})}")
        assert (await text(page, ".ti-position dd")).replace(",", "") == str(i)
        assert await text(page, ".ti-id dd") == str(row["input_ids"][i])
        assert json.loads(await text(page, ".ti-text dd")) == vocab[str(row["input_ids"][i])]
        logprob = await text(page, ".ti-logprob dd")
        assert (
            logprob.startswith(f"{row['logprobs'][i]:.4f}".replace("-", "−")) if i in trained else logprob == "context"
        )
    shown = await page.js("document.querySelector('.strip').textContent")
    pills = await page.js("[...document.querySelectorAll('.strip .cut')].map((p) => p.textContent)")
    for pill in pills:
        shown = shown.replace(pill, "", 1)
    assert shown == "".join(vocab[str(token)] for token in row["input_ids"])
    assert len(pills) == len(row["call_ids"])
    page.check()


async def test_hover_finds_the_token_under_the_pointer(page: Any, run_dir: Path) -> None:
    row = pq.read_table(run_dir / "traces.parquet").to_pylist()[0]
    url = render(run_dir).as_uri()
    where = {"session": row["session_id"], "trace": row["trace_id"]}
    for mode in ("train", "heat", "version", "edges"):
        await page.open(f"{url}#{urlencode({**where, 'view': mode, 'token': row['call_starts'][0] + 5})}")
        await page.js("new Promise((r) => setTimeout(r, 120))")
        x, y = await page.js(
            "(() => { const r = [...CSS.highlights.get('token')][0].getBoundingClientRect();"
            " return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        await press(page, "Escape")
        await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + 200, y=y)
        await page.js("new Promise((r) => setTimeout(r, 60))")
        await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await page.js("new Promise((r) => setTimeout(r, 60))")
        assert (await text(page, ".ti-position dd")).replace(",", "") == str(row["call_starts"][0] + 5), mode
    page.check()


async def test_keys_step_through_the_sessions(page: Any, run_dir: Path) -> None:
    ids = [s.session_id for s in load(run_dir).sessions]
    await page.open(render(run_dir).as_uri())
    for expected in ids[:2]:
        await press(page, "j")
        assert await page.js("document.querySelector('tr.selected').dataset.session") == expected
    await press(page, "k")
    await press(page, "Enter")
    await page.js("new Promise((r) => setTimeout(r, 100))")
    await page.ready()
    assert (await page.js("location.hash")) == f"#session={ids[0]}"
    assert ids[0] in await text(page, "h1")
    page.check()


async def test_text_of_the_run_does_not_run(page: Any, run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "sessions.jsonl").read_text().splitlines()]
    sid = lines[0]["session_id"]
    lines[0] |= {
        "status": "failed",
        "error": {"kind": PAYLOAD, "boundary": PAYLOAD, "message": PAYLOAD},
        "flags": {PAYLOAD: 1},
    }
    lines[0]["task_id"] = PAYLOAD
    lines[0]["scores"] = [{"name": PAYLOAD, "failed": [PAYLOAD], "detail": PAYLOAD}]
    lines[0]["ledger"]["excluded"] = {"constructor": 1, PAYLOAD: 1}
    (run_dir / "sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    vocab = json.loads((run_dir / "vocab.json").read_text())
    (run_dir / "vocab.json").write_text(json.dumps(dict.fromkeys(vocab, PAYLOAD)))
    table = pq.read_table(run_dir / "traces.parquet")
    rows = table.to_pylist()
    rows[0]["messages"] = json.dumps(
        [{"role": PAYLOAD, "content": PAYLOAD}, {"role": "tool", "content": [{"text": PAYLOAD}]}, 7, None]
    )
    pq.write_table(table.from_pylist(rows, schema=table.schema), run_dir / "traces.parquet")
    url = render(run_dir).as_uri()
    await page.open(url)
    assert PAYLOAD[:20] in await text(page, ".err")
    assert "unaccounted" in await page.js("document.body.innerText") or await page.js(
        "!!document.querySelector('td b.no')"
    )
    await page.open(f"{url}#session={sid}")
    await page.js("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    await page.js("document.querySelectorAll('tr.open').forEach((r) => r.click())")
    await page.js("new Promise((r) => setTimeout(r, 100))")
    assert await page.js("document.querySelectorAll('#app img, #app script, #app iframe').length") == 0
    body = await page.js("document.body.innerText")
    assert body.count("onerror=alert(1)") > 5 and "not balanced" in body
    assert all(address.startswith(("file:", "data:", "about:")) for address in page.requests)
    page.check()


@pytest.mark.parametrize(
    "name", ["run.json", "sessions.jsonl", "calls.parquet", "traces.parquet", "ledger.json", "vocab.json", "logs"]
)
async def test_every_page_can_be_drawn_without(page: Any, run_dir: Path, name: str) -> None:
    sid = load(run_dir).sessions[1].session_id
    if name == "logs":
        shutil.rmtree(run_dir / name)
    else:
        (run_dir / name).unlink()
    url = render(run_dir, max_bytes=60_000).as_uri()
    await page.open(url)
    if name not in ("vocab.json", "logs"):
        assert f"not yet: {name}" in await page.js("document.body.innerText")
    await page.open(f"{url}#session={sid}")
    assert sid in await text(page, "h1")
    assert "could not be drawn" not in await page.js("document.body.innerText")
    page.check()
