"""The training step of one policy on its ranks: micro-batches through Megatron's schedule, and the optimizer."""

import mcore_mas.megatron.patches  # noqa: F401  before what is here imports Megatron
