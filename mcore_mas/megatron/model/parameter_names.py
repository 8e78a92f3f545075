"""Layer and expert numbers in Megatron's parameter names.

Megatron counts them from the first layer and the first expert of each rank.
"""

import re

LAYER_NUMBER = re.compile(r"(?<=layers\.)\d+")

# Number of one expert ("3"), or first and last number of a stack of experts ("0-3").
EXPERT_NUMBER = re.compile(r"(?<=experts\.linear_fc[12]\.weight)\d+(-\d+)?")


def renumber(pattern: re.Pattern[str], name: str, shift: int) -> str:
    """Add `shift` to the layer or expert numbers in a parameter's name.

    Args:
        pattern: `LAYER_NUMBER` or `EXPERT_NUMBER`.
    """

    def add_shift(match: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda digits: str(int(digits[0]) + shift), match[0])

    return pattern.sub(add_shift, name)
