"""A trainer's weights and optimizer state: Hugging Face names, import, export, adapters, checkpoints."""

import mcore_mas.megatron.patches  # noqa: F401  before what is here imports Megatron
