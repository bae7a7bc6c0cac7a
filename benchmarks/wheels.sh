#!/bin/bash
# For a GPU machine without network whose image has torch: what else benchmarks/gpu.sh needs, as wheels in a folder.
#   bash benchmarks/wheels.sh [FOLDER]     .whl by default, 75 MB; PYTHON_VERSION=3.12 of that machine
set -euo pipefail
cd "$(dirname "$0")/.."
platforms=()
for glibc in 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
  --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --platform manylinux2014_x86_64 -c constraints.txt -d "${1:-.whl}" \
  transformers tokenizers huggingface_hub accelerate peft datasets pyarrow dill multiprocess xxhash evaluate trl liger-kernel
