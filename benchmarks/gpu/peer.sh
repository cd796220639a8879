#!/usr/bin/env bash
# The peer of throughput.py: vLLM's server on the same card, with made-up weights of the same shape and as much KV cache.
#   benchmarks/gpu/peer.sh PORT [options of vllm serve]      with vLLM in PYTHON (python3), at its defaults otherwise
set -euo pipefail
port=$1; shift
cd "$(dirname "$0")/../.."
model=${MODEL_DIR:-$(mktemp -d)/model}
PYTHONPATH=$PWD "${PYTHON:-python3}" -m benchmarks.gpu.made_up "$model"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True  # with --enable-lora
export VLLM_USE_FLASHINFER_SAMPLER=0  # it draws under top-k and top-p, which no request has here
exec "${PYTHON:-python3}" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name made-up \
  --load-format dummy --dtype bfloat16 --host 127.0.0.1 --port "$port" --max-model-len 2048 --max-num-seqs 256 \
  --gpu-memory-utilization 0.3 --kv-cache-memory-bytes 21500000000 \
  --disable-uvicorn-access-log --disable-log-stats "$@"
