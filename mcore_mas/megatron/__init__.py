"""Training one policy with megatron-core; the only package that imports `megatron.core`.

batch: what a step is fed · cpu: what a machine without CUDA lacks · parallel: process groups · models: Hugging Face
configs as GPT models · attention: packed trees of sequences · names and weights: Hugging Face tensors in and out of any
layout · logprobs: vocabulary-parallel log-probabilities · trainer: the update · gang: one trainer's ranks under Ray
"""

import warnings

from mcore_mas.megatron import cpu

# Training without Transformer Engine or Apex is a supported way, not an accident to be warned of at every import.
warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*")
warnings.filterwarnings("ignore", message="full scope is deprecated")  # Megatron's own default, said at every model
cpu.install()  # before any module of megatron-core is imported
