#!/bin/bash
# tests/gpu/sanitize.sh OUT [SECONDS]: compute-sanitizer over our kernels on the first device, all runs at once, each for
# so long at most (120); a line of each, and its log in OUT. From the root of the repository. The library's kernels are
# run as little as can be (bare.py): they are NVIDIA's, and racecheck sees races inside them. Do not let it choose kernels by
# name: racecheck then fails with "hardware exception".
set -u; OUT=$1; MOST=${2:-120}; mkdir -p "$OUT"; SECONDS=0
export OPENBLAS_NUM_THREADS=2 OMP_NUM_THREADS=2
run() {  # run TOOL NAME TESTS...; OF=application-only: not over the processes that a test starts
  local log=$OUT/$1_$2.log began=$SECONDS; local tool=$1 name=$2; shift 2
  timeout -k 5 "$MOST" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 30 --report-api-errors no \
    --target-processes "${OF:-all}" \
    "${PYTHON:-python3}" -m pytest -c /dev/null --rootdir="$PWD" -q -x -p no:cacheprovider -p tests.gpu.bare "$@" > "$log" 2>&1
  echo "$tool $name: rc $?, $((SECONDS - began)) s; $(grep -ho 'ERROR SUMMARY.*\|RACECHECK SUMMARY.*\|Internal Sanitizer Error.*' "$log" | tail -1); $(grep -h 'passed\|failed\|error' "$log" | tail -1 | cut -c1-150)"
}
ADAPTERS="tests/gpu/test_gpu_adapters.py" PRODUCTS="tests/gpu/test_products.py"
if [ -z "${ONLY:-}" ] || [ "$ONLY" = memcheck ]; then
  for model in qwen3-0.6b smollm2 uneven wide; do run memcheck "changed_$model" $PRODUCTS -k "with_adapters and $model" & done
  run memcheck adapters $ADAPTERS -k "merged_model or mixes or either or flip" &
  run memcheck products $PRODUCTS -k "every_way and (smollm2 or uneven)" &
  run memcheck families tests/gpu/test_gpu_engine.py -k serves &
  run memcheck drawing tests/gpu/test_drawing.py -k "96 or small" &
  run memcheck hash tests/gpu/test_cuda_hash.py &
  run memcheck pulling tests/gpu/test_pulling.py &
  # Another process's memory. No test of more than one push: the sanitizer keeps Python's frames, and so a version that a
  # test has let go of, and with it the slot that the next one is to be copied to.
  OF=application-only run memcheck filling tests/gpu/test_filling.py -k "copied_still and cudaMalloc" &
  PEER_TURNS=1 run memcheck sums tests/gpu/test_peers.py &
fi
if [ -z "${ONLY:-}" ] || [ "$ONLY" = racecheck ]; then
  for product in STORE "ADD and out" GATE "ADD and down"; do
    for way in itself apart; do run racecheck "${product// /_}_$way" $PRODUCTS -k "with_adapters and smollm2 and $product and $way" & done
    run racecheck "${product// /_}" $PRODUCTS -k "every_way and smollm2 and $product" &
  done
  run racecheck families tests/gpu/test_gpu_engine.py -k "serves and (llama or ernie45_moe)" &
  run racecheck drawing tests/gpu/test_drawing.py -k "96-3" &
  run racecheck pulling tests/gpu/test_pulling.py &
  PEER_TURNS=1 run racecheck sums tests/gpu/test_peers.py -k 2 &
fi
if [ -z "${ONLY:-}" ] || [ "$ONLY" = initcheck ]; then
  run initcheck pulling tests/gpu/test_pulling.py &
  PEER_TURNS=1 run initcheck sums tests/gpu/test_peers.py -k 2 &
  run initcheck families tests/gpu/test_gpu_engine.py -k "serves and llama" &
fi
wait
