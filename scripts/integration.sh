#!/usr/bin/env bash
# The demo's tasks through the real CLI against a real vLLM CPU server: same run directory, same checks.
# Needs `polynya` and `python` of the development environment on PATH. Leaves nothing running.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${POLYNYA_VLLM_VENV:-.venv-vllm}"
out="${1:-runs/integration-vllm}"
port="${POLYNYA_VLLM_PORT:-8101}"
url="http://127.0.0.1:$port"

server=""
cleanup() { if [ -n "$server" ]; then kill -TERM -- "-$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; fi; }
trap cleanup EXIT

set -m
bash scripts/vllm_cpu.sh "$venv" "$port" &
server=$!
set +m
python scripts/wait_for.py "$url/health" --pid "$server" --seconds 1500

POLYNYA_TEST_VLLM_URL="$url" python -m pytest -m vllm -q
rm -rf "$out"
python scripts/run_demo_tasks.py --engine "$url" --out "$out"
