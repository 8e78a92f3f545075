"""Layers as sequences of operations, which Megatron names and runs do not use."""

import torch


class Sequential(torch.nn.Sequential):
    """Sequence of operations."""


class FusibleOperation(torch.nn.Module):
    """Operation of a sequence."""
