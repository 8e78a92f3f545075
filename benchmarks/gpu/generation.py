"""Throughput of the embedded engine by number of rows, and agreement of its log-probabilities with the trainer's."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.machine import device, say, start_trainer, stop_trainer, time_call
from benchmarks.gpu.shapes import MODELS, Forest, make_batch
from mcore_mas.megatron.batch import Microbatch
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import read_architecture
from rollout.records.trajectory import Completion, Sampling

MAX_GAP = 1e-3  # nats, between the log-probabilities of engine and trainer in float32
WARM_UP_TOKENS = 4
SEQUENCES_PER_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    model: str
    rows: tuple[int, ...]  # numbers of concurrent requests
    prompt: int  # tokens
    reply: int  # tokens


_TINY = _Load(model="tiny", rows=(1, 4), prompt=8, reply=8)
_FULL = _Load(model="0.5b", rows=(1, 32, 256), prompt=128, reply=64)


def engine(tiny: bool) -> None:
    """Generate replies with a trainer's weights in float32, and let the trainer score the last ones."""
    load = _TINY if tiny else _FULL
    vocab = int(MODELS[load.model]["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = start_trainer(Path(folder), load.model, "small")
        architecture = read_architecture(Path(folder) / load.model)
        max_length = load.prompt + load.reply
        decoder = CachedDecoder(architecture, max_length, device=device().type)
    embedded = EmbeddedEngine(decoder, rows=max(load.rows), reuse_prefixes=False)
    embedded.load_weights(trainer.model.weights(), 1)

    replies: dict[int, Completion] = {}
    prompts: list[list[int]] = []
    for rows in load.rows:
        generator = torch.Generator().manual_seed(rows)
        prompts = torch.randint(vocab, (rows, load.prompt), generator=generator).tolist()
        _generate(embedded, prompts, WARM_UP_TOKENS, replies)
        took_s = time_call(partial(_generate, embedded, prompts, load.reply, replies))
        say(
            rows=rows,
            prompt=load.prompt,
            reply=load.reply,
            tokens_per_s=round(rows * load.reply / took_s),
        )

    engine_logprobs = torch.tensor([replies[row].logprobs for row in range(len(prompts))]).view(-1)
    trainer_logprobs = torch.cat(trainer.score(_batches(prompts, replies, vocab)))
    gap = (engine_logprobs - trainer_logprobs).abs()
    say(
        what="engine and trainer",
        tokens=len(gap),
        mean=float(gap.mean()),
        most=float(gap.max()),
        ok=float(gap.max()) <= MAX_GAP,
    )
    stop_trainer()


def _generate(
    embedded: EmbeddedEngine,
    prompts: Sequence[Sequence[int]],
    reply_tokens: int,
    replies: dict[int, Completion],
) -> None:
    """Generate a reply to each prompt, and store it in `replies` under the number of the prompt."""
    for number, prompt in enumerate(prompts):
        embedded.submit(number, prompt, Sampling(max_tokens=reply_tokens, seed=number))
    while embedded.has_work:
        for number, completion in embedded.step():
            assert isinstance(completion, Completion), completion
            replies[number] = completion


def _batches(
    prompts: Sequence[Sequence[int]], replies: Mapping[int, Completion], vocab: int
) -> list[Microbatch]:
    """Return micro-batches of prompts with their replies, in which the tokens of the replies are trained."""
    batches = []
    for start in range(0, len(prompts), SEQUENCES_PER_BATCH):
        forest: Forest = []
        token_ids: list[int] = []
        labels: list[int] = []
        for row in range(start, min(start + SEQUENCES_PER_BATCH, len(prompts))):
            reply = list(replies[row].token_ids)
            sequence = [*prompts[row], *reply[:-1]]  # the last token predicts nothing
            forest.append((len(sequence), -1, len(reply)))
            token_ids += sequence
            labels += reply
        batch = make_batch(forest, vocab=vocab)
        batches.append(
            replace(batch, token_ids=torch.tensor(token_ids), labels=torch.tensor(labels))
        )
    return batches
