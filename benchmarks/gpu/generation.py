"""The embedded engine: tokens a second by how many rows are decoded at a time, and what the trainer says of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.machine import device, once, say, start_trainer, stop_trainer
from benchmarks.gpu.shapes import MODELS, make_batch
from mcore_mas.megatron.batch import Microbatch
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import read_architecture
from rollout.records.trajectory import Completion, Sampling

GAP = 1e-3  # between log-probabilities of engine and trainer, both in float32


def engine(tiny: bool) -> None:
    """Replies by an engine on this device with a trainer's weights in float32, which then scores the last of them."""
    model, loads, prompt, reply = (
        ("tiny", (1, 4), 8, 8) if tiny else ("0.5b", (1, 32, 256), 128, 64)
    )
    vocab = int(MODELS[model]["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = start_trainer(Path(folder), model, "small")
        decoder = CachedDecoder(
            read_architecture(Path(folder) / model), prompt + reply, device=device().type
        )
    made = EmbeddedEngine(decoder, rows=max(loads), reuse_prefixes=False)
    made.load_weights(trainer.model.weights(), 1)
    replies: dict[int, Completion] = {}
    for rows in loads:
        prompts = torch.randint(
            vocab, (rows, prompt), generator=torch.Generator().manual_seed(rows)
        ).tolist()
        _generate(made, prompts, 4, replies)  # to warm up
        took = once(partial(_generate, made, prompts, reply, replies))
        say(rows=rows, prompt=prompt, reply=reply, tokens_per_s=round(rows * reply / took))
    told = torch.tensor([replies[row].logprobs for row in range(rows)]).view(-1)
    scored = torch.cat(trainer.score(_batches(prompts, replies, vocab)))
    gap = (told - scored).abs()
    ok = float(gap.max()) <= GAP
    say(
        what="engine and trainer",
        tokens=len(gap),
        mean=float(gap.mean()),
        most=float(gap.max()),
        ok=ok,
    )
    stop_trainer()


def _generate(
    made: EmbeddedEngine, prompts: Sequence[Sequence[int]], reply: int, done: dict[int, Completion]
) -> None:
    for number, ids in enumerate(prompts):
        made.submit(number, ids, Sampling(max_tokens=reply, seed=number))
    while made.has_work:
        for number, said in made.step():
            assert isinstance(said, Completion), said
            done[number] = said


def _batches(
    prompts: Sequence[Sequence[int]], replies: dict[int, Completion], vocab: int
) -> list[Microbatch]:
    """Micro-batches of 64 sequences, whose rows are the replies' tokens."""
    found = []
    for first in range(0, len(prompts), 64):
        rows = range(first, min(first + 64, len(prompts)))
        said = [list(replies[row].token_ids) for row in rows]
        tokens = [[*prompts[row], *own[:-1]] for row, own in zip(rows, said, strict=True)]
        forest = [(len(own), -1, len(ids)) for own, ids in zip(tokens, said, strict=True)]
        ids, labels = (torch.tensor(sum(lists, [])) for lists in (tokens, said))  # noqa: RUF017  (few and short)
        found.append(replace(make_batch(forest, vocab=vocab), token_ids=ids, labels=labels))
    return found
