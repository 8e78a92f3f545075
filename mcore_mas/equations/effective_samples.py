"""Effective sample size: the number of replies that an update learns from, if older weights sampled them.

A reply y of a policy μ that is trained with a policy π has the importance weight w = π(y) / μ(y). If a few replies
have nearly all of the weight, the gradient is as noisy as that of a few replies. The effective sample size of n replies
is (Σ w)² / Σ w²: n if all weights are equal, and 1 if one reply has all of the weight.

Source: Kong 1992; for asynchronous RL, VCPO, arXiv 2602.17616.
"""

import math
from collections.abc import Mapping

from mcore_mas.equations.log_ratios import bounded_exp
from mcore_mas.equations.tensors import Tensor, torch

# Names of the sums over replies of 1, w and w². A statistic whose name ends in "_count" is summed over all ranks.
REPLY_SUMS = ("replies_count", "reply_weight_count", "squared_reply_weight_count")


def reply_statistics(logprobs: Tensor, behaviour: Tensor, sequences: Tensor) -> dict[str, Tensor]:
    """Compute 1, w and w² of each reply, as statistics by the names in `REPLY_SUMS`.

    Args:
        logprobs: [N] log π of the tokens.
        behaviour: [N] log μ of the tokens; NaN for tokens that were not sampled, which do not count.
        sequences: [N] int64 id of the token's reply.

    Returns:
        Each statistic [n], for the n replies that have a sampled token.
    """
    is_sampled = ~behaviour.isnan()
    log_ratios = (logprobs - behaviour)[is_sampled].detach().double()
    replies, reply_of_token = torch.unique(sequences[is_sampled], return_inverse=True)
    sums = torch.zeros(len(replies), dtype=torch.float64, device=log_ratios.device)
    weights = bounded_exp(sums.index_add(0, reply_of_token, log_ratios)).to(logprobs.dtype)
    columns = (torch.ones_like(weights), weights, weights.square())
    return dict(zip(REPLY_SUMS, columns, strict=True))


def effective_sample_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the effective sample size in replies, and its share of the number of replies.

    Args:
        sums: sums over all replies, by the names in `REPLY_SUMS`.

    Returns:
        {} without replies, or if the sum of squared weights is not finite.
    """
    replies, weight, squared_weight = (sums.get(name, 0.0) for name in REPLY_SUMS)
    if not replies or not math.isfinite(squared_weight):
        return {}
    size = weight**2 / squared_weight
    return {"effective_sample_size": size, "effective_sample_share": size / replies}
