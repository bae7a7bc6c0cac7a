#!/bin/bash
# Speed, memory and equality at real size on one GPU, in about 9 minutes and without network:
#   bash benchmarks/gpu.sh                 results in outputs/gpu/, a table on the screen
#   DRY=1 bash benchmarks/gpu.sh           the same commands with tiny models on CPU: do they still run?
# Where trl is installed (extra `bench`) each case is compared with it.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${OUT:-outputs/gpu}
against=none
[[ -z ${DRY:-} ]] && "$python" -c 'import trl' 2> /dev/null && against=trl
common=(--against "$against" --repeats 1 --threads 4)
if [[ -n ${DRY:-} ]]; then
  small=(--shape tiny --vocabulary 512 --rows 12 --batch 2 --max-length 96)
  full=("${small[@]}") lora=("${small[@]}" --lora) long=("${small[@]}")
  words=20 more_words=40
  scaling=(--shape tiny --points 2 --repeats 1)
  parts=(--shape tiny --device cpu --vocabulary 512 --tokens 64 --repeats 2)
else
  gpu=(--device cuda --dtype bfloat16 --vocabulary 151936)
  full=("${gpu[@]}" --shape qwen3-0.6b --rows 32 --batch 8 --max-length 1024)
  lora=("${gpu[@]}" --shape qwen3-1.7b --rows 32 --batch 8 --max-length 1024 --lora)
  long=("${gpu[@]}" --shape qwen3-0.6b --rows 8 --batch 2 --max-length 8192)
  words=400 more_words=3200            # two tokens each or so, and as many in the answer
  scaling=(--shape qwen3-0.6b --device cuda --dtype bfloat16 --points 3)
  parts=(--shape qwen3-0.6b)
fi

mkdir -p "$out"
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
echo "== shared = packed = padded, on every attention that is here"
"$python" -m benchmarks.layouts ${DRY:+--shape tiny --device cpu}
echo "== the head's tiles and kernels, forms of attention, shapes that vary"
"$python" -m benchmarks.gpu "${parts[@]}" --out "$out/parts.json"
echo "== full training, about 1k tokens a row"
"$python" -m benchmarks.run --method all --data "$out/rows.jsonl" "${common[@]}" "${full[@]}" --out "$out/full.json"
echo "== LoRA, about 1k tokens a row"
"$python" -m benchmarks.run --method dpo --data "$out/rows.jsonl" "${common[@]}" "${lora[@]}" --out "$out/lora.json"
echo "== full training, about 8k tokens a row"
"$python" -m benchmarks.run --method sft --data "$out/long.jsonl" "${common[@]}" "${long[@]}" --out "$out/long.json"
echo "== how costs grow"
"$python" -m benchmarks.scaling --axis length "${scaling[@]}" --out "$out/scaling.json"
