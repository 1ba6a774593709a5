#!/usr/bin/env bash
# A local Ray cluster of three machines under the rollout server, one killed, one frozen and thawed (scripts/ray_faults.py).
#
#   scripts/ray_faults.sh VENV_DIR [SESSIONS]
#
# Installs Ray into VENV_DIR (0.5 GB, once).
set -euo pipefail
venv=${1:?usage: scripts/ray_faults.sh VENV_DIR [SESSIONS]}
cd "$(dirname "$0")/.."
if ! "$venv/bin/python" -c 'import ray, psutil, polynya' 2> /dev/null; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet -e '.[ray]' psutil
fi
"$venv/bin/python" scripts/ray_faults.py --sessions "${2:-400}"
