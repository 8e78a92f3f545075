#!/usr/bin/env bash
# Installs Transformer Engine, for `layers: te`, into the environment that `python` is of, after environment.post-deploy.sh.
# It takes NVIDIA's built extension where there is one for this torch, CUDA and Python. Else it compiles it, in about half
# an hour of one core (MAX_JOBS=8: of eight), against headers that come as wheels: of CUDA only its driver must be there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cuda=$(python -c 'import torch; print(torch.version.cuda or "")')
if [[ -z $cuda ]]; then
  echo "error: torch is built without CUDA here: Transformer Engine has nothing to compile against" >&2
  exit 1
fi
command -v c++ >/dev/null || { echo "error: no c++ here; environment.yml brings one" >&2; exit 1; }

# what the extension includes beside torch: headers of the toolkit that torch was built with; and what builds it
python -m pip install "cuda-toolkit[cccl,crt,nvcc,profiler]==$cuda.*" 'nvidia-cudnn-frontend>=1.29' wheel ninja pybind11
export NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 MAX_JOBS=${MAX_JOBS:-1}
if ! python -m pip install --no-build-isolation --requirement requirements/transformer-engine.txt; then
  echo "error: Transformer Engine did not build here (above, pip says why): 'layers: te' is refused; all else works" >&2
  exit 1
fi
python -c 'import transformer_engine.pytorch' || {
  echo "error: Transformer Engine was built, and cannot be loaded here; on a machine without a GPU's driver that is so" >&2
  exit 1
}
echo "Transformer Engine is there: policies may have layers: te"
