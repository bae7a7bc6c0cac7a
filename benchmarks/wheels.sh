#!/bin/bash
# Download what the GPU machine's image lacks (benchmarks/gpu_image.txt lists what it has) as wheels for Python 3.12:
#   bash benchmarks/wheels.sh [FOLDER]     default .whl, whose wheels are replaced
# Fails if the wheels are larger than 25 MB, or the wheels and the working tree together than 40 MiB (42 MB).
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-.whl}
packages=(transformers datasets dill multiprocess evaluate trl liger-kernel pydantic pydantic-core typing-inspection
  annotated-types)
platforms=(--platform manylinux2014_x86_64)
for glibc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done

new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --implementation cp --python-version 3.12 "${platforms[@]}" -c constraints.txt -d "$new" "${packages[@]}"

bytes_of() { du --total --bytes --apparent-size --files0-from=- | tail -n 1 | cut -f 1; }
wheels=$(printf '%s\0' "$new"/*.whl | bytes_of)
tree=$(git ls-files -z | bytes_of)
awk -v wheels="$wheels" -v tree="$tree" 'BEGIN {
  printf "wheels %.1f MB, working tree %.1f MB, together %.1f MB\n", wheels / 1e6, tree / 1e6, (wheels + tree) / 1e6 }'
if ((wheels > 25 * 1000 * 1000)); then echo "error: the wheels are larger than 25 MB" >&2; exit 1; fi
if ((wheels + tree > 40 * 1024 * 1024)); then echo "error: wheels and working tree are larger than 40 MiB" >&2; exit 1; fi
mkdir -p "$folder"
rm -f "$folder"/*.whl
mv "$new"/*.whl "$folder"
