"""Reinforcement-learning post-training of teams of LLM agents on Megatron-core."""
