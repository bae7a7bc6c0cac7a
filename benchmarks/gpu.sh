#!/bin/bash
# Speed, memory and equality at real size on one GPU with 80 GB or more, in about 20 minutes and without network:
#   bash benchmarks/gpu.sh [PART ...]      results in outputs/gpu/ (text, JSON, tables in markdown), and on the screen
#   DRY=1 bash benchmarks/gpu.sh           the same commands with tiny models on CPU: do they still run?
# Parts, all by default: layouts kernels small large compiled lora long scaling. A part does not begin after LIMIT (1500)
# seconds; those left out are named, and so are those that failed, which end nothing else. Where trl is installed (extra `bench`) each method is compared with it, both sides
# with Liger's kernels where liger-kernel is installed, TRL with FlashAttention where flash-attn is.
# What the machine's image lacks comes from a folder of wheels (benchmarks/wheels.sh makes it): WHEELS=.whl
# PYTHON and OUT name others than .venv/bin/python (without it python3) and outputs/gpu.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
out=${OUT:-outputs/gpu}
all=(layouts kernels small large compiled lora long scaling)
for part in "$@"; do
  if [[ " ${all[*]} " != *" $part "* ]]; then echo "no part $part; there are ${all[*]}" >&2; exit 2; fi
done
mkdir -p "$out"
if [[ -n ${WHEELS:-} ]]; then
  "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$out/packages" "$WHEELS"/*.whl
  PYTHONPATH=$(realpath "$out/packages")${PYTHONPATH:+:$PYTHONPATH}
  export PYTHONPATH
fi
has() { "$python" -c "import $1" 2> /dev/null; }
if [[ -n ${DRY:-} ]]; then
  tiny=(--against none --repeats 1 --shape tiny --vocabulary 512 --rows 12 --batch 2 --max-length 96)
  small=("${tiny[@]}") large=("${tiny[@]}") lora=("${tiny[@]}" --lora) long=("${tiny[@]}")
  words=20 more_words=40
  scaling=(--shape tiny --points 2 --repeats 1)
  kernels=(--shape tiny --device cpu --vocabulary 512 --tokens 64 --repeats 2)
else
  gpu=(--device cuda --vocabulary 151936 --repeats 1 --threads 4 --against none)
  if has trl; then gpu+=(--against trl); fi
  if has liger_kernel; then gpu+=(--liger); fi
  whole=(--precision bf16)             # float32 weights under bf16 autocast, as is the default
  frozen=(--dtype bfloat16)            # bf16 weights: LoRA's base; and 4 B fully trained, which would not fit otherwise
  small=("${gpu[@]}" "${whole[@]}" --shape qwen3-0.6b --rows 48 --batch 8 --max-length 1024)
  large=("${gpu[@]}" "${frozen[@]}" --shape qwen3-4b --rows 24 --batch 4 --max-length 1024)
  lora=("${gpu[@]}" "${frozen[@]}" --shape qwen3-1.7b --rows 32 --batch 8 --max-length 1024 --lora)
  long=("${gpu[@]}" "${whole[@]}" --shape qwen3-0.6b --rows 8 --batch 2 --max-length 8192)
  words=680 more_words=5400            # a token each, and half as many again in the answer
  scaling=(--shape qwen3-0.6b --device cuda --dtype bfloat16 --points 3)
  kernels=(--shape qwen3-0.6b)
fi

"$python" - "$out" "$words" "$more_words" << 'ROWS'
import json, pathlib, random, sys
draw = random.Random(0)
words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
def text(count):
    return " ".join(draw.choices(words, k=draw.randint(count // 2, count))) + " "
for name, count in zip(("rows", "long"), map(int, sys.argv[2:])):
    rows = ({"question": text(count), "answer": text(count // 2)} for _ in range(64))
    pathlib.Path(sys.argv[1], f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
ROWS

compare() { # NAME ROWS METHOD [OPTION ...]
  "$python" -m benchmarks.run --method "$3" --data "$out/$2.jsonl" "${@:4}" --out "$out/$1.json"
}
measure() {
  case $1 in
    layouts)
      echo "shared = packed = padded, on every attention that is here"
      "$python" -m benchmarks.layouts ${DRY:+--shape tiny --device cpu} | tee "$out/layouts.txt" ;;
    kernels)
      echo "the head's tiles and kernels, forms of attention, shapes that vary"
      "$python" -m benchmarks.gpu "${kernels[@]}" --out "$out/kernels.json" ;;
    small)
      echo "full training of the small model, about 800 tokens a row"
      compare small rows all "${small[@]}" ;;
    large)
      echo "full training of the large model, about 800 tokens a row, bf16 weights"
      compare large rows each "${large[@]}" ;;
    compiled)
      echo "the small model with compiled layers"
      compare compiled rows sft "${small[@]}" --against none --compile ;;
    lora)
      echo "LoRA, about 800 tokens a row"
      compare lora rows dpo "${lora[@]}" ;;
    long)
      echo "full training, about 6k tokens a row"
      compare long long sft "${long[@]}" ;;
    scaling)
      echo "how costs grow"
      "$python" -m benchmarks.scaling --axis length "${scaling[@]}" --out "$out/scaling.json" ;;
  esac
}

left=() failed=()
for part in "${@:-${all[@]}}"; do
  if ((SECONDS > ${LIMIT:-1500})); then left+=("$part"); continue; fi
  echo "== $part, at $SECONDS s"
  measure "$part" || failed+=("$part")
done
echo "== done after $SECONDS s${failed:+; FAILED: ${failed[*]}}${left:+; left out for want of time: ${left[*]}}"
((${#failed[@]} == 0))
