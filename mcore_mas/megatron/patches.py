"""Patch megatron-core for this machine; import this module before any module of Megatron."""

import warnings

from mcore_mas.megatron.apex_replacements import patch_fallbacks
from mcore_mas.megatron.cpu import patch_cuda, patch_release

# Training without Transformer Engine or Apex is supported, so Megatron need not warn of it.
warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*")
warnings.filterwarnings(
    "ignore", message="full scope is deprecated"
)  # Megatron's own default, said at every model
patch_cuda()
patch_release()
patch_fallbacks()
