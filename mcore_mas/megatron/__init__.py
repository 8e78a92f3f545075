"""Training one policy with megatron-core; the only package that imports `megatron.core`.

spec: what a trainer is told · batch: what a step is fed · cpu: what a machine without CUDA lacks · versions: what
differs between releases of megatron-core · parallel: process groups · models: Hugging Face configs as GPT models ·
experts: mixtures of experts in them · layers: what a layer is made of · decoder: the GPT model with its heads ·
attention: packed trees of sequences · lora: adapters on frozen weights · sources: where tensors are read from · names
and weights: Hugging Face tensors in and out of any layout · peft: adapters on disk · state: the optimizer's, likewise
· rates: learning rates · logprobs: vocabulary-parallel log-probabilities · balance: who takes which micro-batch ·
pipeline: passes over micro-batches · statistics: tokens as metrics · reference: the frozen weights · trainer: the
update · gang: one trainer's ranks under Ray
"""

from __future__ import annotations

import warnings

from mcore_mas.megatron import cpu
from mcore_mas.megatron import cpu as versions

# Training without Transformer Engine or Apex is a supported way, not an accident to be warned of at every import.
warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*")
warnings.filterwarnings("ignore", message="full scope is deprecated")  # Megatron's own default, said at every model
cpu.install()  # before any module of megatron-core is imported
versions.repair()
