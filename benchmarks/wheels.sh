#!/bin/bash
# For a GPU machine without network: what benchmarks/gpu.sh needs there, as wheels in a folder. Its image must have torch,
# triton, numpy, packaging, tqdm, pyyaml, requests, filelock, psutil, pandas, jinja2, matplotlib and what those need.
#   bash benchmarks/wheels.sh [FOLDER]     .whl by default, 80 MB; wheels that are in it go first; PYTHON_VERSION=3.12
set -euo pipefail
cd "$(dirname "$0")/.."
rm -f "${1:-.whl}"/*.whl
platforms=()
for glibc in 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
  --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --platform manylinux2014_x86_64 -c constraints.txt -d "${1:-.whl}" \
  transformers tokenizers safetensors regex huggingface_hub httpx2 httpcore2 h11 anyio truststore idna fsspec accelerate peft datasets pyarrow dill multiprocess xxhash evaluate trl liger-kernel
