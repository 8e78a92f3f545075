"""Chats of 16 and 64 turns with tools: each token is computed once, and gradients are those of the turns whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.support.groups import tool_trace
from mcore_mas.packing.pack import pack
from tests.support import ranks, reference

TURNS, CHATS, TASK, SAMPLED, OBSERVED = 16, 3, 20, 6, 9


def trace(vocab: int, turns: int = TURNS) -> list:
    return tool_trace(
        vocab, turns=turns, samples=CHATS, task=TASK, sampled=SAMPLED, observed=OBSERVED
    )


def test_every_token_of_a_chat_is_stored_once() -> None:
    samples = trace(90)
    (batch,) = pack(samples, 10_000)
    # the last sampled token predicts nothing
    assert len(batch.token_ids) == TASK + CHATS * (TURNS * SAMPLED + (TURNS - 1) * OBSERVED - 1)
    whole = sum(TASK + turn * (SAMPLED + OBSERVED) + SAMPLED - 1 for turn in range(TURNS))
    assert batch.unshared == CHATS * whole
    assert len(batch.segments) == 1 + CHATS  # the task, and a path for each chat
    assert len(batch.labels) == CHATS * TURNS * SAMPLED  # what tools said is no label


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("turns", [16, 64])
def test_gradients_are_those_of_whole_turns(turns: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    reference.make_model("qwen2", model)
    spec, out = ranks.make_spec(str(model)), tmp_path / "apart.json"
    arguments = {"spec": spec, "out": out, "samples": trace(90, turns), "max_tokens": 2000}
    ranks.run_jobs([ranks.Job(function=ranks.compare_tree_gradients, arguments=arguments)])
    apart = json.loads(out.read_text())
    print(f"{turns} turns: gradients {apart['relative']:.1e} apart")
    assert apart["norm"] > 0
    assert apart["relative"] <= 1e-6
