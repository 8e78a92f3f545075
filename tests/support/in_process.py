"""A training in one process: an embedded engine, and a trainer group whose one rank is here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from mcore_mas.config.run import RunConfig
from mcore_mas.megatron.batch import CostModel, Microbatch
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.planning.worker_groups import list_worker_groups
from mcore_mas.tracking import logbook
from mcore_mas.training import train, workers
from rollout.base.failpoints import failpoint
from rollout.engines.build import EngineRequest
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.engines.embedded.requests import Report, Request
from rollout.sync.transport import SyncRoute, WeightUpdate
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
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(
        folder
    )
    return folder


class Group:
    """`TrainerGroup`'s calls on one trainer; the process group must exist."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.trainer = MegatronTrainer(spec)
        self.cost_model = CostModel.of(spec, cpu=True)
        self.updates: list[list[Microbatch]] = []

    async def update(
        self, microbatches: Sequence[Microbatch], at: int | None = None
    ) -> dict[str, float]:
        self.updates.append(list(microbatches))
        return self.trainer.update(microbatches, at)

    async def score(
        self, microbatches: Sequence[Microbatch], *, reference: bool = False
    ) -> list[Tensor]:
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

    async def exchange(self, requests: list[Request], aborts: list[int]) -> list[Report]:
        await asyncio.to_thread(failpoint, "token")  # which may take as long as an update
        return await super().exchange(requests, aborts)

    async def begin_update(self) -> SyncRoute:
        return SyncRoute(transport="none", target="", model="")

    async def commit_update(self, update: WeightUpdate) -> None:
        assert self.group is not None
        await self.load_weights(list(self.group.trainer.model.weights()), update.version)
        self.version = update.version

    def abort_update(self, error: Exception) -> None:
        pass

    async def weights_lost(self) -> None:
        await asyncio.Event().wait()


class HereGroup(Group):
    """A trainer group whose one rank is here, with what a whole training asks of it."""

    engines: dict[str, Engine] = {}  # noqa: RUF012  (of the run under way)

    def __init__(self, name: str, spec: TrainerSpec, **_: Any) -> None:
        super().__init__(spec)
        if name in self.engines:  # a critic has none
            self.engines[name].group = self

    async def ready(self) -> None:
        pass

    async def update(
        self, microbatches: Sequence[Microbatch], at: int | None = None
    ) -> dict[str, float]:
        return self.trainer.update(microbatches, at)  # and nothing is kept

    async def save(self, folder: Path) -> None:
        self.trainer.save(folder)

    async def restore(self, folder: Path) -> None:
        self.trainer.restore(folder)

    async def written(self) -> Any:
        return self.trainer.written()

    async def write_model(self, folder: Path) -> None:
        self.trainer.model.write(folder)


def engines_here(requests: Sequence[EngineRequest]) -> dict[str, Engine]:
    """Return an engine in this process for each policy of the requests."""
    HereGroup.engines = {}
    for request in requests:
        for policy in request.policies:
            core = EmbeddedEngine.from_folder(
                str(request.model),
                rows=request.config.slots,
                max_length=request.config.max_length,
                deterministic=request.config.deterministic,
            )
            HereGroup.engines[policy] = Engine(core)
    return dict(HereGroup.engines)


def devices_here(config: RunConfig) -> SimpleNamespace:
    worker_groups = list_worker_groups(config, "CPU")
    return SimpleNamespace(
        device_type="CPU",
        ray_cpus=1,
        ray_gpus=0,
        nodes={"": 1},
        joined=False,
        describe=dict,
        worker_groups=worker_groups,
        threads_per_process=lambda _: 1,
    )


def placed_here(devices: SimpleNamespace) -> SimpleNamespace:
    places = {(group.policy, group.part): [{}] * group.devices for group in devices.worker_groups}
    return SimpleNamespace(options=places, nodes={}, fill=nothing)


def nothing(*_: object) -> None:
    pass


@contextmanager
def training_here(monkeypatch: pytest.MonkeyPatch, *, tracked: bool = False) -> Iterator[None]:
    """Inside the block `train` trains in this process: Ray is replaced, and MLflow unless `tracked`."""
    replaced = {
        "TrainerGroup": HereGroup,
        "make_engines": engines_here,
        "DevicePlacement": placed_here,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(workers, name, value)
    monkeypatch.setattr(train, "find_devices", devices_here)
    monkeypatch.setattr(train, "running_ray", lambda *_, **__: nullcontext())
    if not tracked:
        silent = SimpleNamespace(send=nothing, close=nothing, join=nothing)
        for name in ("MetricsSender", "TraceSender"):
            monkeypatch.setattr(logbook, name, lambda *_, **__: silent)
        monkeypatch.setattr(logbook, "start_training_record", nothing)
    init_process_groups(rank=0, threads=1)
    try:
        yield
    finally:
        destroy_process_groups()
