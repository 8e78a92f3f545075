"""Training one policy with megatron-core; the only package that imports `megatron.core`.

spec: what a trainer is told, and its process groups · batch: micro-batches and load balancing · layout: theirs in
attention · device: their way to the device, and what a machine without Apex lacks · cpu: what one without CUDA lacks ·
model/: the GPT model · state/: its weights, in and out of any layout, and its optimizer · step/:
passes, updates, and the worker group of one trainer
"""

import warnings

from mcore_mas.megatron.cpu import patch_cuda, patch_release
from mcore_mas.megatron.device import patch_fallbacks

# Training without Transformer Engine or Apex is a supported way, not an accident to be warned of at every import.
warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*")
warnings.filterwarnings("ignore", message="full scope is deprecated")  # Megatron's own default, said at every model
patch_cuda()  # before any module of megatron-core is imported
patch_release()
patch_fallbacks()
