"""The child process of the embedded engine: ``python -m polynya.engines.llamacpp_server --model FILE …``.

It starts llama.cpp's HTTP server from ``xllamacpp`` on a free loopback port, prints one JSON line with its address on
standard output, and serves until its standard input ends or its parent dies. The API key comes in the environment
variable ``POLYNYA_LLAMACPP_KEY``, never on the command line, where other users could read it. Refuses to start without one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from typing import Any

KEY_VARIABLE = "POLYNYA_LLAMACPP_KEY"
_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="polynya.engines.llamacpp_server")
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--window", type=int, required=True, help="tokens of one slot")
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--poll", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--cache-ram-mib", type=int, required=True)
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    key = os.environ.pop(KEY_VARIABLE, "")
    if not key:
        print(f"{KEY_VARIABLE} is empty: the server would be open to every local user", file=sys.stderr)
        return 2
    try:
        server = _start(options, key)
    except (RuntimeError, ValueError, OSError, ImportError) as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    # whatever llama.cpp prints belongs into the log, so the one line that the parent reads stands alone
    print(json.dumps({"address": server.listening_address, "pid": os.getpid()}), flush=True)
    sys.stdin.buffer.read()
    # llama.cpp's destructors wait for the running batch; nothing here needs them
    os._exit(0)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends, and end at once when it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(3)


def _start(options: argparse.Namespace, key: str) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.api_keys = [key]
    params.n_parallel = options.slots
    params.n_ctx = options.window * options.slots
    params.kv_unified = False
    params.n_batch = params.n_ubatch = options.batch
    params.cache_ram_mib = options.cache_ram_mib
    params.n_cache_reuse = 0  # exactness first: no shifted key-value cells
    params.ctx_shift = False
    params.fit_params = False
    params.use_jinja = True
    params.ui = False
    params.endpoint_slots = True
    params.sse_ping_interval = 1  # a cancelled prefill is noticed by a failing write
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = options.threads
        threads.poll = options.poll
    return xllamacpp.Server(params)


if __name__ == "__main__":
    sys.exit(main())
