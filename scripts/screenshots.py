"""Pictures and timings of a run's page, by a headless Chromium found on PATH.

    python scripts/screenshots.py RUN --out docs/images/     run-light.png, run-dark.png, session-*.png, tokens-*.png
    python scripts/screenshots.py RUN --measure              JSON with milliseconds, nothing written

Invariants: the page is opened from its file, with the network off; an exception or a console error in it is a failure.
This script refuses to go on without Chromium, and talks to it by the DevTools protocol only: no driver is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp

from polynya.viewer import load, render

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-default-apps", "--disable-dev-shm-usage", "--disable-extensions", "--disable-sync", "--no-first-run",
    "--no-default-browser-check", "--hide-scrollbars", "--metrics-recording-only", "--remote-debugging-port=0",
)  # fmt: skip

ROOT_FLAGS = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
"""Chromium refuses its own sandbox to root, as in most containers."""


class BrowserError(Exception):
    """Chromium is missing, did not start, or the page reported an error."""


def find_browser() -> str:
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    raise BrowserError(f"none of {', '.join(BROWSERS)} is on PATH; install chromium")


class Page:
    """One tab, driven over its DevTools socket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            future = self._waiting.pop(event.get("id", -1), None)
            if future is not None and not future.done():
                future.set_result(event)
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(params["exceptionDetails"])[:2000])
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    self.problems.append(params["entry"]["text"])
                case "Runtime.consoleAPICalled" if params["type"] == "error":
                    self.problems.append(json.dumps(params["args"])[:2000])
                case "Page.javascriptDialogOpening":
                    self.problems.append(f"a dialog opened: {params['message']}")
                case "Network.requestWillBeSent":
                    self.requests.append(params["request"]["url"])

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        future = asyncio.get_running_loop().create_future()
        self._waiting[self._next] = future
        await self._socket.send_json({"id": self._next, "method": method, "params": params})
        answer: dict[str, Any] = await asyncio.wait_for(future, 60)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    async def js(self, expression: str) -> Any:
        result = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise BrowserError(json.dumps(result["exceptionDetails"])[:2000])
        return result["result"].get("value")

    async def open(self, url: str) -> None:
        """Load ``url`` anew and wait until the page says that it is drawn and two frames have passed."""
        await self.send("Page.navigate", url="about:blank")
        await self.send("Page.navigate", url=url)
        await self.ready()

    async def ready(self) -> None:
        for _ in range(1200):
            if await self.js("document.documentElement?.dataset.ready === '1'"):
                break
            await asyncio.sleep(0.05)
        else:
            raise BrowserError(f"the page was not drawn within 60 s; {self.problems}")
        await self.js("new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")

    async def size(self, width: int, height: int, scale: float, *, dark: bool) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def check(self) -> None:
        if self.problems:
            raise BrowserError("the page reported: " + "; ".join(self.problems))


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A fresh Chromium with one tab, the network off; gone on leaving."""
    with tempfile.TemporaryDirectory(prefix="polynya-view-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            find_browser(), *FLAGS, *ROOT_FLAGS, f"--user-data-dir={profile}", "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    listener = asyncio.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.send(f"{domain}.enable")
                    yield page
                listener.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _port(path: Path, process: asyncio.subprocess.Process) -> int:
    for _ in range(600):
        if process.returncode is not None:
            raise BrowserError(f"Chromium ended with {process.returncode} before it listened")
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            return int(path.read_text().splitlines()[0])
        await asyncio.sleep(0.05)
    raise BrowserError("Chromium did not open its DevTools port within 30 s")


# --- what is shown -------------------------------------------------------------------------------------------------


def showpiece(run_dir: Path, wanted: str | None) -> tuple[str, str]:
    """The session with the longest trace (or ``wanted``), and that trace."""
    data = load(run_dir)
    traces = [t for sid, rows in data.traces.items() for t in rows if wanted in (None, sid)]
    if not traces:
        raise BrowserError(f"{run_dir}: no trace{f' of session {wanted}' if wanted else ''} to show")
    best = max(traces, key=lambda trace: trace.length)
    return best.session_id, best.trace_id


async def pictures(page: Page, url: str, session: str, trace: str, out: Path) -> list[Path]:
    made: list[Path] = []
    for dark in (False, True):
        theme = "dark" if dark else "light"
        await page.size(1360, 900, 2, dark=dark)
        shots = {"run": {}, "session": {"session": session}}
        for view in ("train", "heat", "version", "edges"):
            shots[f"tokens-{view}"] = {"session": session, "trace": trace, "view": view}
        for name, where in shots.items():
            await page.open(f"{url}#{urlencode(where)}")
            if "view" in where:
                await page.js("document.querySelector('.stripbox').scrollIntoView(); scrollBy(0, -76)")
                for key in "tttll":
                    await page.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
                    await page.send("Input.dispatchKeyEvent", type="keyUp", key=key)
            await page.js("new Promise((r) => setTimeout(r, 150))")
            path = out / f"{name}-{theme}.png"
            await page.picture(path)
            made.append(path)
    return made


MEASURE = """(async () => {
  const frame = () => new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)));
  const out = {nodes: document.querySelectorAll('.strip *').length};
  const timed = async (name, act) => {
    const start = performance.now();
    act();
    await frame();
    out[name] = +(performance.now() - start).toFixed(1);
  };
  const box = document.querySelector('.strip');
  for (const mode of ['heat', 'version', 'edges', 'train']) {
    await timed('switch_' + mode, () => document.querySelector(`[data-mode=${mode}]`).click());
    out['build_' + mode] = +document.documentElement.dataset.stripMs;
  }
  await timed('scroll_to_middle', () => { box.scrollTop = box.scrollHeight / 2; });
  await timed('scroll_to_end', () => { box.scrollTop = box.scrollHeight; });
  await timed('next_low', () => document.querySelectorAll('.stripbox .quiet')[1].click());
  box.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}));
  const rect = box.getBoundingClientRect();
  const start = performance.now();
  for (let i = 0; i < 30; i++) {
    const at = {clientX: rect.left + 40 + i * 9, clientY: rect.top + 40 + i * 8, bubbles: true};
    box.dispatchEvent(new PointerEvent('pointermove', at));
    await new Promise(requestAnimationFrame);
  }
  out.hover_each_with_frame = +((performance.now() - start) / 30).toFixed(1);
  return out;
})()"""


async def measure(page: Page, url: str, session: str, trace: str) -> dict[str, Any]:
    await page.size(1360, 900, 1, dark=False)
    await page.open(url)
    root = "document.documentElement.dataset"
    load_ms = "+performance.getEntriesByType('navigation')[0].duration.toFixed(1)"
    found: dict[str, Any] = {"run_page": {"draw": float(await page.js(f"{root}.drawMs")), "load": await page.js(load_ms),
                                          "nodes": await page.js("document.querySelectorAll('#app *').length")}}  # fmt: skip
    await page.open(f"{url}#{urlencode({'session': session, 'trace': trace})}")
    found["session_page"] = {"draw": float(await page.js(f"{root}.drawMs")), "load": await page.js(load_ms)}
    found["strip"] = {"build_first": float(await page.js(f"{root}.stripMs")), **await page.js(MEASURE)}
    return found


async def main(arguments: argparse.Namespace) -> None:
    run_dir = Path(arguments.run)
    session, trace = showpiece(run_dir, arguments.session)
    with tempfile.TemporaryDirectory(prefix="polynya-shot-") as folder:
        url = render(run_dir, Path(folder) / "view.html", sessions=[session]).as_uri()
        async with browser() as page:
            if arguments.measure:
                print(json.dumps(await measure(page, url, session, trace), indent=2))
            else:
                out = Path(arguments.out)
                out.mkdir(parents=True, exist_ok=True)
                for path in await pictures(page, url, session, trace, out):
                    print(path)
            page.check()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory")
    parser.add_argument("--out", default="docs/images", help="folder for the pictures")
    parser.add_argument("--session", help="session to show; default: the one with the longest trace")
    parser.add_argument("--measure", action="store_true", help="print milliseconds as JSON instead")
    try:
        asyncio.run(main(parser.parse_args()))
    except BrowserError as error:
        sys.exit(str(error))
