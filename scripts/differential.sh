#!/usr/bin/env bash
# Our rows against TRL's and tinker-cookbook's own functions on random histories (scripts/differential.py says what is compared).
#
#   scripts/differential.sh VENV_DIR [HISTORIES]
#
# Installs both into VENV_DIR (1.5 GB with torch, once).
set -euo pipefail
venv=${1:?usage: scripts/differential.sh VENV_DIR [HISTORIES]}
cd "$(dirname "$0")/.."
if ! "$venv/bin/python" -c 'import trl, tinker_cookbook, polynya' 2> /dev/null; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet torch==2.13.0 trl==1.16.0 tinker==0.38.0 chz tiktoken pillow blobfile -e .
  # its remaining requirements are for other parts of it, and one of them has no wheel for Python 3.11
  "$venv/bin/pip" install --quiet --no-deps tinker-cookbook==0.6.1
fi
TRL_EXPERIMENTAL_SILENCE=1 "$venv/bin/python" scripts/differential.py --histories "${2:-10000}"
