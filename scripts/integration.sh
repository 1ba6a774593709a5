#!/usr/bin/env bash
# Every harness CLI on the scripted engine, the registry on PostgreSQL; two CLIs for twelve turns on the embedded model, with
# continuation and without; our rows beside those of other trainers; a Ray cluster that loses machines; then tests and the demo's tasks against a real vLLM CPU server, with the same checks.
# Needs `polynya` and `python` of the development environment on PATH. Leaves nothing running.
set -euo pipefail
cd "$(dirname "$0")/.."

python -m pytest -m "clis or postgres or faults" -q
POLYNYA_R1_EXAMPLES=2000 python -m pytest tests/rollout/registry/test_machine.py -q
rm -rf runs/integration-turns
python scripts/real_continuation.py --out runs/integration-turns
bash scripts/differential.sh "${POLYNYA_DIFFERENTIAL_VENV:-.venv-differential}"
bash scripts/ray_faults.sh "${POLYNYA_RAY_VENV:-.venv-ray}"

venv="${POLYNYA_VLLM_VENV:-.venv-vllm}"
out="${1:-runs/integration-vllm}"
port="${POLYNYA_VLLM_PORT:-8101}"

stop() {
  pid="$(cat "$venv/server.pid" 2>/dev/null)" || return 0
  kill "$pid" 2>/dev/null || return 0
  for _ in $(seq 60); do kill -0 "$pid" 2>/dev/null || return 0; sleep 1; done
  kill -KILL "$pid" 2>/dev/null || true
}
trap stop EXIT

url="$(bash scripts/vllm_cpu.sh "$venv" "$port" | sed -n 's/^export POLYNYA_TEST_VLLM_URL=//p')"
POLYNYA_TEST_VLLM_URL="$url" python -m pytest -m vllm -q
rm -rf "$out"
python scripts/run_demo_tasks.py --engine "$url" --out "$out"
