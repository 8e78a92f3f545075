"""What can be wrong with a request, in the same words from every engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout.engines.protocol import Sampling

BUSY = "the engine cannot sleep while requests are running; end or abort them first"


def problem_of(prompt_ids: Sequence[int], sampling: Sampling, vocab_size: int, max_length: int) -> str:
    """Why an engine with `vocab_size` and `max_length` cannot serve the request; "" if it can."""
    size = len(prompt_ids)
    if not size:
        return "the prompt is empty; expected at least one token"
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        return f"the prompt has token ids outside 0..{vocab_size - 1}; is it from another tokenizer?"
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}; expected at least 1"
    if size + sampling.max_tokens > max_length:
        return (
            f"prompt of {size} tokens and max_tokens {sampling.max_tokens} exceed the engine's max_length "
            f"{max_length}; shorten the prompt or raise max_length"
        )
    if not 0 <= sampling.temperature < math.inf:
        return f"temperature is {sampling.temperature}; expected 0 (greedy) or more"
    if not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        return f"top_p is {sampling.top_p} and top_k {sampling.top_k}; expected 0 < top_p <= 1 and top_k >= 0"
    return ""
