"""A recorded turn, sampled again from what was written down of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Sampling, Turn


def sample_again(
    engine: EmbeddedEngine, turn: Turn, weights: Callable[[int], Iterable[tuple[str, Any]]]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and log-probabilities of a turn from its prompt and seed, by the weights that sampled which of its tokens.

    Nothing else may run on `engine`; `weights` gives those of a version.
    """
    first, *later = turn.versions
    changes = {span.start: span.version for span in later}
    engine.load_weights(weights(first.version), first.version)
    sampling = Sampling(
        temperature=turn.temperature, max_tokens=len(turn.completion_ids), seed=turn.seed
    )
    engine.submit(0, turn.prompt_ids, sampling)
    began, done = engine.stats.decode_tokens, []
    while not done:
        version = changes.get(engine.stats.decode_tokens - began)
        if version is not None:
            engine.load_weights(weights(version), version)
        done = engine.step()
    [(_, completion)] = done
    return completion.token_ids, completion.logprobs
