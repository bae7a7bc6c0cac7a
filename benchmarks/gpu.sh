#!/bin/bash
# The GPU benchmarks of docs/benchmarks.md in one command, for a machine with one GPU of 80 GB and without network:
#   bash benchmarks/gpu.sh                     all parts, in at most LIMIT (560) seconds
#   PARTS="c d" bash benchmarks/gpu.sh         only these parts, in this order
#   DRY=1 bash benchmarks/gpu.sh               a rehearsal: the same code with tiny models, on CPU
# Settings:
#   WHEELS    folder of `benchmarks/wheels.sh`, whose packages are installed next to those of the machine
#   CACHES    caches.tar.gz of an earlier run, with the kernels that Triton and Inductor have compiled
#   PYTHON    interpreter, default .venv/bin/python or python3
#   OUT       folder of the results, default outputs/gpu: records.jsonl, summary.txt, log.txt and, if below 16 MiB,
#             caches.tar.gz
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
out=${OUT:-outputs/gpu}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [[ -n ${WHEELS:-} ]]; then
  # dill pickles the functions of a module by name only where its path contains "site-packages"
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
    --target "$work/site-packages" "$WHEELS"/*.whl
  export PYTHONPATH=$work/site-packages${PYTHONPATH:+:$PYTHONPATH}
fi

export TRITON_CACHE_DIR=$work/caches/triton TORCHINDUCTOR_CACHE_DIR=$work/caches/inductor
mkdir -p "$TRITON_CACHE_DIR" "$TORCHINDUCTOR_CACHE_DIR"
if [[ -n ${CACHES:-} ]] && ! tar -xzf "$CACHES" -C "$work"; then
  echo "CACHES=$CACHES cannot be read: every kernel is compiled again" >&2
fi

export HF_HUB_OFFLINE=1 HF_HOME=$work/hf TOKENIZERS_PARALLELISM=false TRL_EXPERIMENTAL_SILENCE=1 PYTHONUNBUFFERED=1
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))} OMP_WAIT_POLICY=PASSIVE
status=0
"$python" -m benchmarks.gpu --out "$out" --limit "${LIMIT:-560}" ${DRY:+--device cpu --tiny} 2>&1 | tee "$out/log.txt" || status=$?

tar -czf "$work/caches.tar.gz" -C "$work" caches
if (($(stat -c %s "$work/caches.tar.gz") < 16 * 1024 * 1024)); then mv "$work/caches.tar.gz" "$out/"; fi
exit $status
