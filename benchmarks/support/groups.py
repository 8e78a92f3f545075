"""Samples of groups of trajectories with realistic lengths; token ids are random, with a fixed seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.support.training import make_sample
from mcore_mas.credit.samples import Sample

_TRAJECTORIES = 4
_ROUNDS = 4
_GROUP_SIZE = 8
_RESPONSE_TOKENS = 64


def responses(vocab: int, *, prompts: int = 1, prompt_tokens: int = 512) -> list[Sample]:
    """Return 8 responses of 64 tokens to each of `prompts` prompts of `prompt_tokens` tokens."""
    random = np.random.default_rng(0)
    samples = []
    for first in range(0, _GROUP_SIZE * prompts, _GROUP_SIZE):
        prompt_ids = random.integers(0, vocab, prompt_tokens).tolist()
        for number in range(first, first + _GROUP_SIZE):
            response_ids = random.integers(0, vocab, _RESPONSE_TOKENS).tolist()
            samples.append(make_sample(prompt_ids, response_ids, number))
    return samples


def team_trace(vocab: int) -> list[Sample]:
    """Return the turns of a solver and a verifier in four trajectories on one task.

    Both speak in each of four rounds. A prompt has the agent's system prompt (60 tokens), the
    problem (about 250) and all earlier messages: an attempt has about 70 tokens, a verdict about
    25, and the team adds about 8 around each.
    """
    random = np.random.default_rng(0)

    def draw_ids(mean_length: float) -> list[int]:
        length = max(4, round(random.normal(mean_length, mean_length / 6)))
        return random.integers(0, vocab, length).tolist()

    system_prompts = {
        agent: random.integers(0, vocab, 60).tolist() for agent in ("solver", "verifier")
    }
    problem = draw_ids(250)
    samples = []
    for number in range(_TRAJECTORIES):
        messages: list[int] = []
        for _ in range(_ROUNDS):
            for agent, length in (("solver", 70), ("verifier", 25)):
                completion = draw_ids(length)
                prompt = system_prompts[agent] + problem + messages
                samples.append(replace(make_sample(prompt, completion, number), agent=agent))
                messages += completion + draw_ids(8)
    return samples


def tool_trace(
    vocab: int,
    *,
    turns: int,
    chats: int = 8,
    task_tokens: int = 300,
    reply_tokens: int = 100,
    result_tokens: int = 150,
) -> list[Sample]:
    """Return the turns of chats with tools on one task; a turn's prompt is the whole chat before it.

    Args:
        vocab: size of the vocabulary.
        turns: turns of a chat.
        chats: number of chats.
        task_tokens: tokens of the task, with which every chat begins.
        reply_tokens: tokens of a reply.
        result_tokens: tokens of a tool's result, which follows each reply.
    """
    random = np.random.default_rng(0)
    task_ids = random.integers(0, vocab, task_tokens).tolist()
    samples = []
    for number in range(chats):
        chat = list(task_ids)
        for turn in range(turns):
            completion = random.integers(0, vocab, reply_tokens).tolist()
            samples.append(replace(make_sample(chat, completion, number), turn=turn))
            chat += completion + random.integers(0, vocab, result_tokens).tolist()
    return samples
