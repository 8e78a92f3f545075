"""Shares of agents in the gradient of their policy, and the factors that set these shares.

An agent's *share* is the norm of its part of the gradient over the sum of the norms of all parts. With the wanted
shares s_k, the balanced gradient is Σ_k w_k g_k, where w_k = s_k Σ_j ‖g_j‖ / ‖g_k‖ makes the share of agent k equal to
s_k and keeps the sum of all norms. The sum over agents is accumulated before all norms are known, so w_k is applied in
two steps: `part_factor` to each part, and `sum_factor` to their sum.
"""

import math
from collections.abc import Mapping


def gradient_shares(
    norms: Mapping[str, float], weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the share of each agent in the gradient of its policy.

    Args:
        norms: norm of each agent's own part of the gradient.
        weights: the shares of a balanced gradient are proportional to these weights; None: the
            gradient is not balanced.

    Returns:
        Shares, whose sum is 1; {} if all norms are 0, or one is not finite.
    """
    total = sum(norms.values())
    if not total or not math.isfinite(total):
        return {}
    if weights is None:
        return {agent: norm / total for agent, norm in norms.items()}
    total_weight = _weight_with_gradient(norms, weights)
    return {agent: weights[agent] / total_weight if norm else 0.0 for agent, norm in norms.items()}


def part_factor(norm: float, weight: float) -> float:
    """Return the factor after which an agent's part of the gradient has a norm equal to its weight.

    It is 1 if the norm is 0 or not finite: such a part cannot be balanced.
    """
    return weight / norm if norm and math.isfinite(norm) else 1.0


def sum_factor(norms: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the factor of the sum of all balanced parts that restores the sum of their norms before `part_factor`.

    The weights of agents without a gradient do not count. The factor is 1 if all norms are 0, or
    one is not finite.

    Args:
        norms: norm of each agent's part of the gradient, before its `part_factor`.
        weights: weight of each agent.
    """
    total = sum(norms.values())
    if not total or not math.isfinite(total):
        return 1.0
    return total / _weight_with_gradient(norms, weights)


def _weight_with_gradient(norms: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return sum(weights[agent] for agent, norm in norms.items() if norm)
