"""A helper process of the server that is started again whenever it ends, and that ends when the server does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_STEADY = 60.0
_log = logging.getLogger("polynya.server")


async def supervise(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Until cancelled. Its standard input is a pipe that closes with this process, however that ends."""
    pause, loop = _FIRST_PAUSE, asyncio.get_running_loop()
    while True:
        begun = loop.time()
        child = await asyncio.create_subprocess_exec(*argv, env=env, stdin=asyncio.subprocess.PIPE)
        try:
            code = await child.wait()
        except asyncio.CancelledError:
            if child.stdin is not None:
                child.stdin.close()
            child.terminate()
            await child.wait()
            raise
        pause = _FIRST_PAUSE if loop.time() - begun > _STEADY else min(2 * pause, _LONGEST_PAUSE)
        _log.error("%s ended with %d; started again in %g s", argv[2] if len(argv) > 2 else argv[0], code, pause)
        await asyncio.sleep(pause)
