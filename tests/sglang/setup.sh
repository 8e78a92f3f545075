#!/usr/bin/env bash
# Makes .venv-sglang, the environment of SGLang's own: as published where there is a GPU, otherwise what its server needs
# to run dense decoders on a CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3.11}
"$python" -m venv .venv-sglang
install=(.venv-sglang/bin/python -m pip install --quiet --no-compile --disable-pip-version-check)
if command -v nvidia-smi > /dev/null && nvidia-smi --list-gpus > /dev/null; then
    "${install[@]}" --requirement requirements/sglang.txt
else
    # torch alone and first, so that the CPU build is chosen where an index offers one
    "${install[@]}" "$(grep -E '^torch==' requirements/sglang-cpu.txt)"
    "${install[@]}" --no-deps --requirement requirements/sglang-cpu.txt
    .venv-sglang/bin/python tests/sglang/patch_cpu.py
fi
touch .venv-sglang/.stamp
