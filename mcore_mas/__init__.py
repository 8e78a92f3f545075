"""Reinforcement-learning post-training of teams of LLM agents on Megatron-core."""

from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parent.parent
# The folder of configs/ and workflow/: the checkout, or in an installed package where setup.py puts them.
SHIPPED = _CHECKOUT if (_CHECKOUT / "configs").is_dir() else Path(__file__).resolve().parent / "shipped"
