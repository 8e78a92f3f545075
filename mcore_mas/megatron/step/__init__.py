"""The training step of one policy on its ranks: micro-batches through Megatron's schedule, and the optimizer."""
