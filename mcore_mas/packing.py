"""Samples as micro-batches: equal prompts are stored and computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from mcore_mas.megatron.batch import Microbatch, Tree
from mcore_mas.samples import Sample

_Branch = tuple[tuple[int, ...], list[Sample]]  # a prompt and the samples that reply to it
_WHOLE_PER_TREE = 32  # sequences that are attended to in one padded call; more would pad more


def pack(samples: Sequence[Sample], max_tokens: int) -> list[Microbatch]:
    """Pack one policy's samples, agent by agent, into micro-batches of about `max_tokens` tokens.

    Samples of one agent with the same prompt share it. A micro-batch is closed before it would exceed `max_tokens`;
    only a single sequence that is longer by itself may.
    """
    microbatches = []
    for agent in sorted({sample.agent for sample in samples}):
        own = [sample for sample in samples if sample.agent == agent]
        microbatches += [_microbatch(agent, branches) for branches in _fill(_branches(own), max_tokens)]
    return microbatches


def _branches(samples: Iterable[Sample]) -> list[_Branch]:
    by_prompt: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_ids, []).append(sample)
    shared = [(prompt, replies) for prompt, replies in by_prompt.items() if len(replies) > 1 and prompt]
    # a prompt with one reply shares nothing: as whole sequences, such samples attend in one batched call
    whole = [
        _whole(sample) for prompt, replies in by_prompt.items() if len(replies) == 1 or not prompt for sample in replies
    ]
    whole.sort(key=lambda sample: len(sample.completion_ids))
    return shared + [((), whole[i : i + _WHOLE_PER_TREE]) for i in range(0, len(whole), _WHOLE_PER_TREE)]


def _whole(sample: Sample) -> Sample:
    """The same training signal with the prompt as the untrained head of the completion."""
    head = len(sample.prompt_ids)
    if not head:
        return sample
    return replace(
        sample,
        prompt_ids=(),
        completion_ids=sample.prompt_ids + sample.completion_ids,
        trained=(False,) * head + (sample.trained or (True,) * len(sample.completion_ids)),
        behaviour=None if sample.behaviour is None else (float("nan"),) * head + sample.behaviour,
    )


def _fill(branches: list[_Branch], max_tokens: int) -> Iterator[list[_Branch]]:
    batch: list[_Branch] = []
    room = max_tokens
    for prompt, replies in branches:
        open_branch: list[Sample] | None = None
        for sample in replies:
            cost = len(sample.completion_ids) + (len(prompt) if open_branch is None else 0)
            if cost > room and batch:
                yield batch
                batch, room, open_branch = [], max_tokens, None
                cost = len(sample.completion_ids) + len(prompt)
            if open_branch is None:
                open_branch = []
                batch.append((prompt, open_branch))
            open_branch.append(sample)
            room -= cost
    if batch:
        yield batch


def _microbatch(agent: str, branches: list[_Branch]) -> Microbatch:
    trees: list[Tree] = []
    token_ids: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    rows: list[tuple[int, float, float, float, float]] = []  # label, temperature, behaviour, advantage, weight
    for prompt, samples in branches:
        trees.append(Tree(prompt=len(prompt), replies=tuple(len(s.completion_ids) for s in samples)))
        token_ids += prompt
        positions += range(len(prompt))
        last_of_prompt = len(token_ids) - 1
        for sample in samples:
            first = len(token_ids)
            token_ids += sample.completion_ids
            positions += range(len(prompt), len(prompt) + len(sample.completion_ids))
            for i, label in enumerate(sample.completion_ids):
                if sample.trained is None or sample.trained[i]:
                    predictors.append(first + i - 1 if i else last_of_prompt)
                    behaviour = sample.behaviour[i] if sample.behaviour is not None else float("nan")
                    rows.append((label, sample.temperature, behaviour, sample.advantage, sample.weight))
    labels, temperatures, behaviours, advantages, weights = zip(*rows, strict=True)
    return Microbatch(
        agent=agent,
        trees=tuple(trees),
        token_ids=torch.tensor(token_ids),
        position_ids=torch.tensor(positions),
        predictors=torch.tensor(predictors),
        labels=torch.tensor(labels),
        temperatures=torch.tensor(temperatures),
        behaviour=torch.tensor(behaviours),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights),
    )
