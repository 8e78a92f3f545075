"""Recipes of FP8: formats, and how scales are chosen."""

from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    """Formats of the forward and of the backward pass."""

    E4M3 = ("float8_e4m3fn", "float8_e4m3fn")
    HYBRID = ("float8_e4m3fn", "float8_e5m2")


@dataclass
class Recipe:
    """Base of all recipes.

    Attributes:
        row_multiple: rows of a factor must be a multiple of it.
        column_multiple: its columns likewise.
    """

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False

    row_multiple = 8
    column_multiple = 16


@dataclass
class DelayedScaling(Recipe):
    """Scales of earlier products."""


@dataclass
class Float8CurrentScaling(Recipe):
    """One scale for each tensor."""


@dataclass
class MXFP8BlockScaling(Recipe):
    """A scale for each 32 numbers."""

    row_multiple = 32
    column_multiple = 32


@dataclass
class Float8BlockScaling(Recipe):
    """A scale for each 128 numbers of activations, and for 128 x 128 numbers of weights."""

    row_multiple = 128
    column_multiple = 128
