"""What groups of trajectories look like as samples: lengths as on record, tokens drawn by seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.support.training import make_sample
from mcore_mas.credit.samples import Sample

_SAMPLES, _TURNS = 4, 4


def responses(vocab: int, *, prompts: int = 1, prompt: int = 512) -> list[Sample]:
    """8 responses of 64 tokens to each of `prompts` prompts of `prompt` tokens."""
    draw = np.random.default_rng(0)
    samples = []
    for first in range(0, 8 * prompts, 8):
        shared = draw.integers(0, vocab, prompt).tolist()
        samples += [
            make_sample(shared, draw.integers(0, vocab, 64).tolist(), first + n) for n in range(8)
        ]
    return samples


def team_trace(vocab: int) -> list[Sample]:
    """Turns of a solver and a verifier in four trajectories on one task.

    Both speak in each of four turns. Their prompts are a system prompt of their own (60 tokens), the problem (about
    250), and everything that was said: an attempt is about 70 tokens, a verdict about 25, and what the team adds
    around each about 8.
    """
    draw = np.random.default_rng(0)

    def ids(length: float) -> list[int]:
        return draw.integers(0, vocab, max(4, round(draw.normal(length, length / 6)))).tolist()

    system = {agent: draw.integers(0, vocab, 60).tolist() for agent in ("solver", "verifier")}
    problem = ids(250)
    samples = []
    for number in range(_SAMPLES):
        said: list[int] = []
        for _ in range(_TURNS):
            for agent, length in (("solver", 70), ("verifier", 25)):
                completion = ids(length)
                sample = make_sample(system[agent] + problem + said, completion, number)
                samples.append(replace(sample, agent=agent))
                said += completion + ids(8)
    return samples


def tool_trace(
    vocab: int,
    *,
    turns: int,
    samples: int = 8,
    task: int = 300,
    sampled: int = 100,
    observed: int = 150,
) -> list[Sample]:
    """The turns of chats with tools on one task, each turn's prompt being all tokens before it.

    Every chat begins with the task; a turn samples some tokens, and a tool's result of some follows.
    """
    draw = np.random.default_rng(0)
    begin = draw.integers(0, vocab, task).tolist()
    found = []
    for number in range(samples):
        said = list(begin)
        for turn in range(turns):
            completion = draw.integers(0, vocab, sampled).tolist()
            found.append(replace(make_sample(said, completion, number), turn=turn))
            said += completion + draw.integers(0, vocab, observed).tolist()
    return found
