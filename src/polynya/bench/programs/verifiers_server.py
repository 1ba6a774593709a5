"""verifiers' interception server with its relay client: started with the upstream's port and the number of sessions.

Prints ``{"port", "keys"}``. It keeps the message graph, and neither asks for ids nor keeps them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


async def main() -> None:
    os.environ["BENCH_KEY"] = "unused"
    server = InterceptionServer()
    await server.start()
    client = EvalClientConfig(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key_var="BENCH_KEY")
    keys = []
    for number in range(int(sys.argv[2])):
        task = TraceTask(type="bench", data=TaskData(idx=number))
        trace = Trace(task=task, agent=AgentInfo(config=AgentConfig()))
        session = RolloutSession(ctx=ModelContext(model="bench", client=client), trace=trace)
        keys.append(server.register(session)[0])
    print(json.dumps({"port": server.port, "keys": keys}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
