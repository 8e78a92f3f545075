#!/usr/bin/env bash
# Second stage of environment.yml, and of `make setup` on a machine with GPUs. Run it in the activated
# environment, in the repository's root. It installs torch for the CUDA version of the driver, which
# nvidia-smi reports, and the NCCL of SGLang's torch; Transformer Engine, where it can be built; and
# with CUDA 13 SGLang's own environment, .venv-sglang. Without a driver, for example in the build of
# an image, it takes CUDA 13, or the version that you set:
#   CUDA=12 bash environment.post-deploy.sh
set -euo pipefail

cuda=${CUDA:-$({ nvidia-smi 2>/dev/null || true; } | sed -n 's/.*CUDA Version: *\([0-9]*\)\..*/\1/p')}
case ${cuda:=13} in
  13) index=() ;; # wheels of PyPI
  12) index=(--index-url https://download.pytorch.org/whl/cu126) ;;
  *) echo "error: CUDA $cuda: torch is built for 12 and 13; update the driver, or set CUDA to one of them" >&2; exit 1 ;;
esac
lock=requirements/lock$(python -c 'import sys; print("-3.12" if sys.version_info >= (3, 12) else "")').txt

# torch is installed first, from its own index, so that the lock file finds it installed.
python -m pip install ${index[@]+"${index[@]}"} "$(grep -E '^torch==' "$lock")"
python -m pip install --requirement "$lock" --requirement requirements/gpu.txt
python -m pip install --no-deps "$(grep "^nvidia-nccl-cu$cuda==" requirements/nccl.txt)"

python -m pip install --no-deps --no-build-isolation --editable .

MAX_JOBS=${MAX_JOBS:-$(nproc)} bash requirements/transformer_engine.sh ||
  echo "continuing without Transformer Engine, which only layers: te needs" >&2
if [ "$cuda" = 13 ]; then
  CUDA=$cuda bash requirements/sglang.sh python ||
    echo "continuing without SGLang; make it later with: bash requirements/sglang.sh" >&2
else
  echo "SGLang needs CUDA 13: here the embedded engine samples" >&2
fi
