"""Tensors in FP8; the stand-in makes none."""


class QuantizedTensor:
    """Base class of tensors in FP8."""
