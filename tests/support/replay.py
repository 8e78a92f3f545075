"""Sampling of a recorded turn again, from its record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Sampling, Turn


def sample_again(
    engine: EmbeddedEngine, turn: Turn, weights: Callable[[int], Iterable[tuple[str, Any]]]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the tokens and log-probabilities that a turn's prompt, seed and weights give.

    Args:
        engine: engine without other requests.
        turn: a turn, which records the version of the weights that sampled each token.
        weights: returns the weights of a version.
    """
    first, *later = turn.versions
    updates = {span.start: span.version for span in later}
    engine.load_weights(weights(first.version), first.version)
    sampling = Sampling(
        temperature=turn.temperature, max_tokens=len(turn.completion_ids), seed=turn.seed
    )
    engine.submit(0, turn.prompt_ids, sampling)
    tokens_before = engine.stats.decode_tokens
    outcomes = []
    while not outcomes:
        version = updates.get(engine.stats.decode_tokens - tokens_before)
        if version is not None:
            engine.load_weights(weights(version), version)
        outcomes = engine.step()
    [(_, completion)] = outcomes
    return completion.token_ids, completion.logprobs
