"""Megatron's GPT model with tree attention, context parallelism, and a head for log-probabilities or values."""

import mcore_mas.megatron.patches  # noqa: F401  patches Megatron before this package imports it
