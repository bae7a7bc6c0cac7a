#!/bin/bash
# The GPU benchmarks of docs/reference/benchmarks.md in one command, for a machine with one GPU of 80 GB and without network:
#   bash benchmarks/gpu.sh
# Settings, as environment variables:
#   PARTS     letters of parts in order, default abcdfegh
#   CASES     regular expression of the measurements' names, default all
#   LIMIT     seconds of the whole command, default 580, for a rehearsal 2300
#   WHEELS    folder of `benchmarks/wheels.sh`, whose packages are used in addition to those of the machine
#   CACHES    caches.tar.gz of an earlier run, with the kernels that Triton and Inductor have compiled
#   PYTHON    interpreter, default .venv/bin/python or python3
#   OUT       folder of the results, default outputs/gpu: records.jsonl, summary.txt, log.txt, traces of part h and,
#             below 16 MiB, caches.tar.gz
#   DRY       1 for a rehearsal: the same code with tiny models, on CPU
set -euo pipefail
cd "$(dirname "$0")/.."
if (($# > 0)); then sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; [[ $1 == --help ]] && exit; exit 2; fi

fail() { echo "error: $*" >&2; exit 2; }
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
out=${OUT:-outputs/gpu}
limit=${LIMIT:-$([[ ${DRY:-} == 1 ]] && echo 2300 || echo 580)}
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail "LIMIT must be a positive number of seconds, not $limit"
[[ ${DRY:-} =~ ^(0|1|)$ ]] || fail "DRY must be 1 or 0, not $DRY"
[[ ${PARTS:-a} =~ ^[a-h\ ,]+$ ]] || fail "PARTS has letters from a to h, not '$PARTS'"
tiny=()
if [[ ${DRY:-} == 1 ]]; then tiny=(--device cpu --tiny); fi
if [[ -n ${WHEELS:-} ]]; then
  compgen -G "$WHEELS/*.whl" > /dev/null || fail "there are no wheels in $WHEELS: run benchmarks/wheels.sh"
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
    fail "the wheels are for Python 3.12, and $python is another version: set PYTHON"
elif ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("datasets") is None)'; then
  fail "$python has no datasets: set WHEELS to the folder of benchmarks/wheels.sh"
fi

mkdir -p "$out"
rm -f "$out/summary.txt" "$out/caches.tar.gz.new"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ -n ${WHEELS:-} ]]; then
  # dill pickles the functions of a module by name only if its path contains "site-packages"
  for wheel in "$WHEELS"/*.whl; do "$python" -m zipfile -e "$wheel" "$work/site-packages"; done
  export PYTHONPATH=$work/site-packages${PYTHONPATH:+:$PYTHONPATH}
fi

export TRITON_CACHE_DIR=$work/caches/triton TORCHINDUCTOR_CACHE_DIR=$work/caches/inductor
mkdir -p "$TRITON_CACHE_DIR" "$TORCHINDUCTOR_CACHE_DIR"
if [[ -n ${CACHES:-} ]] && ! tar -xzf "$CACHES" -C "$work" 2> /dev/null; then
  echo "CACHES=$CACHES cannot be read: every kernel is compiled again"
fi

export HF_HUB_OFFLINE=1 HF_HOME=$work/hf TOKENIZERS_PARALLELISM=false TRL_EXPERIMENTAL_SILENCE=1 PYTHONUNBUFFERED=1
export TORCH_CUDNN_SDPA_DEPRIORITIZED=1 # cuDNN plans attention anew for each shape, which would slow TRL down
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))} OMP_WAIT_POLICY=PASSIVE

reserve=$((limit > 100 ? 20 : 0)) # for the summary and the caches
status=0
"$python" -m benchmarks.gpu --out "$out" --limit $((limit - SECONDS - reserve > 1 ? limit - SECONDS - reserve : 1)) \
  "${tiny[@]}" > >(tee -i "$out/log.txt") 2>&1 &
run=$!
trap 'kill -TERM $run' TERM INT HUP
wait $run || status=$?
while kill -0 $run 2> /dev/null; do wait $run || status=$?; done

files=$(find "$work/caches" -type f | wc -l)
if ((files > 0)); then
  timeout 15 tar -czf "$out/caches.tar.gz.new" -C "$work" caches || true
  bytes=$(stat -c %s "$out/caches.tar.gz.new" 2> /dev/null || echo 0)
  if ((bytes > 0 && bytes < 16 * 1024 * 1024)); then
    mv "$out/caches.tar.gz.new" "$out/caches.tar.gz"
  else
    rm -f "$out/caches.tar.gz.new"
    echo "caches.tar.gz is not kept: $files files, $((bytes / 1024 / 1024)) MiB"
  fi
fi
exit $status
