"""megatron-core made ready for this machine, as this is imported: before any module of Megatron's."""

import warnings

from mcore_mas.megatron.apex_replacements import patch_fallbacks
from mcore_mas.megatron.cpu import patch_cuda, patch_release

# Training without Transformer Engine or Apex is a supported way, not an accident to be warned of at every import.
warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*")
warnings.filterwarnings(
    "ignore", message="full scope is deprecated"
)  # Megatron's own default, said at every model
patch_cuda()
patch_release()
patch_fallbacks()
