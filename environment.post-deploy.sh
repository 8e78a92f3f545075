#!/usr/bin/env bash
# Second stage of environment.yml, run inside the activated environment from the repository's root.
set -euo pipefail

# torch first and alone: the wheels below compile and link against it
python -m pip install "$(grep -E '^torch==' requirements/lock.txt)"
python -m pip install --requirement requirements/lock.txt

# kernels that build against the torch that is installed now
python -m pip install --no-build-isolation --requirement requirements/gpu.txt

python -m pip install --no-deps --no-build-isolation --editable .
