"""Make ``tests/fixtures/recordings/requests.jsonl.xz`` from recorded traffic: python scripts/trim_recordings.py RECORDINGS.

RECORDINGS holds ``<harness>/<case>.jsonl``, one request and response a line. Kept: method, path, query, the headers that the
gateway or a reader may care about, and the body with long texts cut. A text is cut to its first and last characters with a
digest between, so equal texts stay equal and different ones different. Ids, arguments, signatures and numbers stay as they are.
Equal requests of one case are one row with a count.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from pathlib import Path
from typing import Any

HEAD, TAIL = 500, 250
WHOLE = {
    "arguments",
    "signature",
    "thoughtSignature",
    "encrypted_content",
    "data",
    "url",
    "image_url",
    "type",
    "user_id",
}
DROPPED_HEADERS = {
    "accept-encoding", "accept-language", "authorization", "connection", "content-length", "host", "sec-fetch-mode",
    "x-api-key", "x-goog-api-key", "sec-websocket-key", "sec-websocket-extensions",
}  # fmt: skip
TARGET = Path(__file__).parent.parent / "tests" / "fixtures" / "recordings" / "requests.jsonl.xz"


def cut(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: cut(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [cut(item, key) for item in value]
    if not isinstance(value, str) or key in WHOLE or len(value) <= HEAD + TAIL + 20:
        return value
    digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"{value[:HEAD]}…{digest}…{value[-TAIL:]}"


def rows(source: Path) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(source.glob("*/*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            headers = {name.lower(): value for name, value in (record.get("headers") or {}).items()}
            row = {
                "harness": file.parent.name,
                "case": file.stem,
                "method": record["method"],
                "path": "/v1" + path.partition("/v1")[2] if "/v1" in (path := record["path"]) else path,
                "query": record.get("query") or "",
                "headers": {name: value for name, value in headers.items() if name not in DROPPED_HEADERS},
                "body": cut(record.get("body")),
            }
            if record["method"] == "WS":
                # what the reply was called, so that a later frame's previous_response_id can be told
                answer = record.get("resp") or {}
                events = answer.get("stream") or [{}]
                row["answered"] = answer.get("id") or events[0].get("response", {}).get("id")
            found.setdefault(json.dumps(row), row | {"times": 0})["times"] += 1
    return list(found.values())


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: trim_recordings.py RECORDINGS (a folder of <harness>/<case>.jsonl)")
    found = rows(Path(sys.argv[1]))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
    TARGET.write_bytes(lzma.compress(text.encode("utf-8", "surrogatepass"), preset=9))
    lines = sum(row["times"] for row in found)
    print(f"{lines} lines, {len(found)} distinct, {len(text)} bytes, {TARGET.stat().st_size} compressed")


if __name__ == "__main__":
    main()
