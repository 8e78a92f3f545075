"""Patch megatron-core for this machine; import this module before any module of Megatron."""

import logging
import warnings

from mcore_mas.megatron.apex_replacements import patch_fallbacks
from mcore_mas.megatron.cpu import patch_cuda
from mcore_mas.megatron.versions import patch_version

# Training works without Transformer Engine and Apex, so Megatron's warnings about them mislead.
warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*")
# Megatron 0.20 logs for every pipeline stage that the class of its model is deprecated.
logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
    lambda record: "DEPRECATED" not in record.getMessage()
)
# Megatron logs for every layer that it does not know the class of this package's MLP.
logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(
    lambda record: "Unknown MLP type" not in record.getMessage()
)
# Megatron warns about the default of its setting `cuda_graph_scope` each time that a model is built.
warnings.filterwarnings("ignore", message="full scope is deprecated")

patch_cuda()
patch_version()
patch_fallbacks()
