"""Megatron's GPT model with tree attention, context parallelism, and a head for log-probabilities or values."""
