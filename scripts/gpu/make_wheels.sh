#!/usr/bin/env bash
# Makes a folder of wheels for a bare machine without network: Python 3.12 on x86-64 Linux, with torch, Triton, numba,
# transformers, accelerate, peft and pytest, without NeMo and what it needs. Where there is a network:
#   bash scripts/gpu/make_wheels.sh FOLDER [PYTHON, default .venv/bin/python: an environment with this project in it]
# and there:
#   WHEELS=FOLDER PYTHON=python3 bash scripts/gpu_check.sh
# What is needed is read from the environment's packages (scripts/gpu/needed_wheels.py), versions from constraints.txt.
# Wheels come for CPython 3.12; packages that have sources only are built. bitsandbytes keeps CUDA 13.0's library alone,
# plotly plotly.js.
# Ends with 1 where the folder would be larger than 35 MiB.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:?usage: bash scripts/gpu/make_wheels.sh FOLDER [PYTHON]} python=${2:-.venv/bin/python}
most=$((35 * 2**20))
platforms=()
for platform in manylinux_2_{39,35,34,31,28,27,24,17}_x86_64 manylinux2014_x86_64 manylinux1_x86_64; do
    platforms+=(--platform "$platform")
done
mkdir -p "$folder"
rm -f "$folder"/*.whl
needed=$("$python" scripts/gpu/needed_wheels.py)
while read -r requirement; do
    if ! "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" --dest "$folder" "$requirement"; then
        echo "make_wheels: $requirement has no wheel; it is built from its sources" >&2
        DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$requirement"
    fi
done <<<"$needed"
for wheel in "$folder"/{bitsandbytes,plotly}-*.whl; do
    [ ! -e "$wheel" ] || "$python" scripts/gpu/needed_wheels.py --thin "$wheel"
done
# A build for this interpreter is of no use to another one.
for wheel in "$folder"/*.whl; do
    case $wheel in
        *-none-any.whl | *-cp312-*.whl | *-abi3-*.whl | *-py3-none-*linux*.whl | *-py2.py3-none-*linux*.whl) ;;
        *) echo "make_wheels: $wheel is not for CPython 3.12" >&2 && exit 1 ;;
    esac
done
size=$(du -cb "$folder"/*.whl | tail -1 | cut -f1)
echo "$(ls "$folder"/*.whl | wc -l) wheels, $((size / 2**20)) MiB, in $folder"
[ "$size" -le $most ] || { echo "make_wheels: more than $((most / 2**20)) MiB" >&2; exit 1; }
