"""Shares of agents in the gradient of their policy."""

import math
from collections.abc import Mapping


def gradient_shares(norms: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each agent in the gradient of its policy: its norm over the sum of all norms.

    Args:
        norms: norm of each agent's own part of the gradient.

    Returns:
        Shares, whose sum is 1; {} if all norms are 0, or one is not finite.
    """
    total = sum(norms.values())
    if not total or not math.isfinite(total):
        return {}
    return {agent: norm / total for agent, norm in norms.items()}
