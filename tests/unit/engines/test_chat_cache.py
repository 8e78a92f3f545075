"""The turns of a chat reuse cached keys and values: the engine computes each token once."""

from __future__ import annotations

from pathlib import Path

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Completion, Sampling
from tests.support.tiny import MAX_LENGTH, make_model

TURNS = 16
SAMPLED = 3  # tokens of each reply
OBSERVED = 5  # tokens of the tool's result after each reply
TASK = tuple(range(1, 21))


def test_sixteen_turns_prefill_each_token_once(tmp_path: Path) -> None:
    make_model(0).save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_folder(tmp_path, max_length=MAX_LENGTH, rows=4)
    prompt = TASK
    for turn in range(TURNS):
        engine.submit(turn, prompt, Sampling(max_tokens=SAMPLED, seed=turn))
        completions: list[tuple[int, object]] = []
        while not completions:
            completions = engine.step()
        [(_, completion)] = completions
        assert isinstance(completion, Completion)
        if turn:
            # All tokens but the result of the tool and the last sampled token, which has no keys yet.
            assert completion.cached_tokens == len(prompt) - OBSERVED - 1
        prompt += completion.token_ids + tuple(range(30, 30 + OBSERVED))
    assert engine.stats.prefill_tokens == len(TASK) + (TURNS - 1) * (OBSERVED + 1)
    assert engine.stats.decode_tokens == TURNS * SAMPLED
