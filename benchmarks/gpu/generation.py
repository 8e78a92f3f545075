"""Throughput of the embedded engine by number of rows, and agreement of its log-probabilities with the trainer's."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import device, say, start_trainer, stop_trainer, time_call
from benchmarks.gpu.shapes import MODELS, Forest, make_batch
from mcore_mas.equations.agreement import GAP_BOUNDS
from mcore_mas.megatron.batch import Microbatch
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.gpu_decoder import make_decoder
from rollout.models.architecture import read_architecture
from rollout.records.trajectory import Completion, Sampling

WARM_UP_TOKENS = 4
SEQUENCES_PER_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    model: str
    rows: tuple[int, ...]  # numbers of concurrent requests
    prompt: int  # tokens
    reply: int  # tokens


_TINY = _Load(model="tiny", rows=(1, 4), prompt=8, reply=8)
_FULL = _Load(model="0.5b", rows=(1, 16, 64, 256), prompt=128, reply=64)


def engine(tiny: bool) -> None:
    """Generate replies with a trainer's weights in both precisions, with and without CUDA graphs."""
    load = _TINY if tiny else _FULL
    for bf16 in (True, False):
        _measure(load, bf16=bf16)


def _measure(load: _Load, *, bf16: bool) -> None:
    """Measure the tokens per second by number of rows, and let the trainer score the last replies."""
    vocab = int(MODELS[load.model]["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = start_trainer(Path(folder), load.model, "small", bf16=bf16)
        architecture = read_architecture(Path(folder) / load.model)
    max_length = load.prompt + load.reply
    decoder = make_decoder(architecture, max_length, device=device().type, bf16=bf16)
    decoder.load(trainer.model.weights())

    for graphs in (False, True):
        embedded = EmbeddedEngine(decoder, rows=max(load.rows), reuse_prefixes=False, graphs=graphs)
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
                bf16=bf16,
                graphs=graphs,
                tokens_per_s=round(rows * load.reply / took_s),
            )
        _compare(trainer, prompts, replies, vocab=vocab, bf16=bf16, graphs=graphs)
        embedded.sleep(("kv_cache",))  # frees its memory
    stop_trainer()


def _compare(
    trainer: Any,
    prompts: Sequence[Sequence[int]],
    replies: Mapping[int, Completion],
    *,
    vocab: int,
    bf16: bool,
    graphs: bool,
) -> None:
    """Compare the engine's log-probabilities with the trainer's, by the bounds of a run."""
    engine_logprobs = torch.tensor([replies[row].logprobs for row in range(len(prompts))]).view(-1)
    trainer_logprobs = torch.cat(trainer.score(_batches(prompts, replies, vocab)))
    log_ratio = trainer_logprobs - engine_logprobs
    gap = log_ratio.abs()
    figures = {
        "mean": float(gap.mean()),
        "k3": float((torch.expm1(log_ratio) - log_ratio).mean()),
        "p99": float(gap.sort().values[int(0.99 * (len(gap) - 1))]),
        "max": float(gap.max()),
    }
    bounds = GAP_BOUNDS["bfloat16" if bf16 else "float32"]
    say(
        what="engine and trainer",
        tokens=len(gap),
        bf16=bf16,
        graphs=graphs,
        **figures,
        ok=all(figures[figure] <= bound for figure, bound in bounds.items()),
    )


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
