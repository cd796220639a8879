#!/usr/bin/env bash
# Everything about a trainer on a GPU, on a host with one, torch and no network:
#   benchmarks/gpu/run.sh WHEELS OUT [options of python -m benchmarks.gpu]
# WHEELS: directory of wheels for this host's python3 (Paddle's CPU wheel and what `pip install -e .[serve]` names
# besides); a wheel too large to carry may come cut in pieces NAME.whl.part-*. OUT: directory for gpu.json and logs.
set -euo pipefail
wheels=$(realpath "$1"); mkdir -p "$2"; out=$(realpath "$2"); shift 2
cd "$(dirname "$0")/../.."
site=${SITE:-$(mktemp -d)}
for first in "$wheels"/*.whl.part-aa; do
  [ -e "$first" ] || continue
  cat "${first%.part-aa}".part-* > "${first%.part-aa}" && rm "${first%.part-aa}".part-*
done
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
export PYTHONPATH=$site:$PWD PYTHONUNBUFFERED=1
# Three of four cores compute; the fourth of each replica's share is left to the store, API and trainer.
exec python3 -m benchmarks.gpu --out "$out/gpu.json" --logs "$out/logs" \
  --set worker.threads=3 --set worker.max_model_len=512 --set worker.max_batch=16 "$@"
