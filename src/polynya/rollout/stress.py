"""Many sessions at once on the scripted engine, with every captured token compared with the script. For ``bench`` and tests."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from polynya.config import NodeLimits, Settings
from polynya.engines.scripted import Script, ScriptedEngine, Step
from polynya.rollout.parse import parse_task
from polynya.rollout.runner import Runner, RunOptions
from polynya.schema import TaskSpec

_AGENT = r"""
import http.client, json, os, sys
address = os.environ["OPENAI_BASE_URL"].removeprefix("http://")
host, _, path = address.partition("/")
connection = http.client.HTTPConnection(host, timeout=600)
messages = []
for turn in range(int(sys.argv[1])):
    messages.append({"role": "user", "content": "turn %d" % turn})
    body = json.dumps({"model": "policy", "messages": messages})
    connection.request("POST", "/" + path + "/chat/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        sys.exit("HTTP %d: %s" % (answer.status, text[:300]))
    messages.append(json.loads(text)["choices"][0]["message"])
"""


def stress_task(sessions: int, calls: int, runtime: str) -> TaskSpec:
    """A shell agent that asks ``calls`` times and echoes each answer, as real harnesses do."""
    return parse_task(
        {
            "task_id": "stress",
            "instruction": "talk",
            "num_samples": sessions,
            "harness": {"name": "shell", "settings": {"command": f"python3 agent.py {calls}"}},
            "runtime": {"name": runtime, "files": {"agent.py": _AGENT}},
            "retries": 0,
        },
        "stress",
    )


def stress_script(calls: int, delay: float = 0.05) -> Script:
    return Script(steps=[Step(text=f"answer {turn} " + "word " * (turn % 7)) for turn in range(calls)], delay=delay)


async def stages_report(out: Path, cache: Path, *, sessions: int, calls: int, runtime: str) -> dict[str, Any]:
    """Run and compare. Raises PolynyaError when the run cannot begin."""
    script = stress_script(calls)
    half = max(1, min(32, sessions // 2))
    limits = NodeLimits(init=min(8, sessions), ready=half, running=sessions, postrun=8)
    options = RunOptions(out=out, cache=cache, settings=Settings(node=limits), command="bench stages")
    begun, cpu = time.monotonic(), time.process_time()
    record = await Runner([stress_task(sessions, calls, runtime)], ScriptedEngine(script), options).run()
    differences = compare(out, script, sessions, calls)
    lag = record["loop_lag"]
    return {
        "sessions": sessions,
        "calls_each": calls,
        "runtime": runtime,
        "completed": record["summary"]["by_status"].get("completed", 0),
        "calls_captured": record["summary"]["calls"],
        "tokens_captured": record["summary"]["ledger"]["captured"],
        "tokens_trained": record["summary"]["ledger"]["trained"],
        "exact": not differences,
        "differences": dict(differences),
        "seconds": round(time.monotonic() - begun, 2),
        "polynya_cpu_seconds": round(time.process_time() - cpu, 2),
        **{f"loop_{name}": value for name, value in lag.items()},
    }


def compare(run: Path, script: Script, sessions: int, calls: int) -> Counter[str]:
    """How the captured calls and rows differ from what the script says; empty when they are exact."""
    differences: Counter[str] = Counter()
    table = pq.read_table(run / "calls.parquet").to_pylist()
    by_session: dict[str, list[dict[str, Any]]] = {}
    for row in table:
        by_session.setdefault(row["session_id"], []).append(row)
    differences["sessions_missing"] += sessions - len(by_session)
    for session_id, rows in by_session.items():
        differences["calls_missing"] += abs(calls - len(rows))
        for turn, row in enumerate(sorted(rows, key=lambda item: item["index"])):
            expected = script.expected(session_id, turn)
            differences["ids"] += row["completion_ids"] != expected.sampled_ids.tolist()
            differences["logprobs"] += not np.array_equal(np.float32(row["logprobs"]), expected.logprobs)
            differences["not_delivered"] += not row["delivered"]
    for row in pq.read_table(run / "traces.parquet", columns=["session_id", "input_ids", "loss_mask"]).to_pylist():
        trained = [i for i, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
        said = np.concatenate([script.expected(row["session_id"], turn).sampled_ids for turn in range(calls)]).tolist()
        differences["rows"] += trained != said
    return +differences
