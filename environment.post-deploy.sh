#!/usr/bin/env bash
# Second stage of environment.yml, run inside the activated environment from the repository's root.
set -euo pipefail

# torch first and alone: the wheels below compile and link against it
python -m pip install "$(grep -E '^torch==' requirements/lock.txt)"
python -m pip install --requirement requirements/lock.txt

# Transformer Engine builds against the torch that is installed now. It is for `layers: te` alone: all else goes on.
python -m pip install --no-build-isolation --requirement requirements/gpu.txt ||
  echo "Transformer Engine did not build here: every layout but 'layers: te' works without it" >&2

# `transport: distributed` is one NCCL group with SGLang's environment, whose torch 2.14.1 brings 2.30.7; NCCL refuses a
# group of two versions, and torch takes a newer one than its own
python -m pip install --no-deps nvidia-nccl-cu13==2.30.7

python -m pip install --no-deps --no-build-isolation --editable .
