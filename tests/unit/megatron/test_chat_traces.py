"""Chats of many turns with tools: each token is stored once, and gradients are those of separate turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.support.groups import tool_trace
from mcore_mas.credit.samples import Sample
from mcore_mas.packing.pack import pack
from tests.support import ranks, reference

CHATS = 3
TURNS = 16

# Tokens of the task, of a sampled reply, and of a tool's output.
TASK = 20
SAMPLED = 6
OBSERVED = 9


def make_samples(turns: int) -> list[Sample]:
    """Return a sample for each turn of each chat."""
    return tool_trace(
        90,
        turns=turns,
        chats=CHATS,
        task_tokens=TASK,
        reply_tokens=SAMPLED,
        result_tokens=OBSERVED,
    )


def test_every_token_of_a_chat_is_stored_once() -> None:
    (batch,) = pack(make_samples(TURNS), 10_000)
    # The last sampled token of a chat predicts nothing, and is left out.
    chat_tokens = TURNS * SAMPLED + (TURNS - 1) * OBSERVED - 1
    assert len(batch.token_ids) == TASK + CHATS * chat_tokens
    separate_turns = [TASK + turn * (SAMPLED + OBSERVED) + SAMPLED - 1 for turn in range(TURNS)]
    assert batch.tokens_without_sharing == CHATS * sum(separate_turns)
    assert len(batch.segments) == 1 + CHATS  # the task, and each chat
    assert len(batch.labels) == CHATS * TURNS * SAMPLED  # outputs of tools are no labels


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("turns", [16, 64])
def test_gradients_are_those_of_separate_turns(turns: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    reference.make_model("qwen2", model)
    out = tmp_path / "difference.json"
    arguments = {
        "spec": ranks.make_spec(str(model)),
        "out": out,
        "samples": make_samples(turns),
        "max_tokens": 2000,
    }
    ranks.run_jobs([ranks.Job(function=ranks.compare_tree_gradients, arguments=arguments)])
    difference = json.loads(out.read_text())
    print(f"{turns} turns: relative difference of gradients {difference['relative']:.1e}")
    assert difference["norm"] > 0
    assert difference["relative"] <= 1e-6
