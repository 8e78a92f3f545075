"""A training in one process: an embedded engine, and a trainer group whose one rank is here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from mcore_mas.megatron.batch import CostModel, Microbatch
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.rollout.engines.embedded.batching import LocalEngine
from mcore_mas.rollout.sync import SyncRoute, WeightUpdate
from tests.support.simulated import handed_over


class Bytes:
    """A renderer whose tokens are bytes; 0 ends a reply."""

    stop = (0,)

    def render(self, messages: Any) -> tuple[int, ...]:
        return tuple("\n".join(m.content for m in messages).encode("latin-1"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("latin-1")


def make_model(folder: Path) -> Path:
    """Random weights of two layers over bytes."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


class Group:
    """`TrainerGroup`'s calls on one trainer; the process group must exist."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.trainer = MegatronTrainer(spec)
        self.cost_model = CostModel.of(spec)
        self.updates: list[list[Microbatch]] = []

    async def update(self, microbatches: Sequence[Microbatch], at: int | None = None) -> dict[str, float]:
        self.updates.append(list(microbatches))
        return self.trainer.update(microbatches, at)

    async def score(self, microbatches: Sequence[Microbatch], *, reference: bool = False) -> list[Tensor]:
        return self.trainer.score(microbatches, reference=reference)

    async def export(self, route: SyncRoute, version: int) -> WeightUpdate:
        return handed_over(version)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        yield


class Engine(LocalEngine):
    """The embedded engine, which reads new weights from a trainer in the same process."""

    starts, pause_s, version = 1, 0.0, 0
    group: Group | None = None

    async def begin_update(self) -> SyncRoute:
        return SyncRoute(transport="none", place="", model="")

    async def commit_update(self, update: WeightUpdate) -> None:
        assert self.group is not None
        await self.load_weights(list(self.group.trainer.model.weights()), update.version)
        self.version = update.version

    def abort_update(self, error: Exception) -> None:
        pass

    async def weights_lost(self) -> None:
        await asyncio.Event().wait()
