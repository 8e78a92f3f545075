"""Training in one process: an embedded engine, and a trainer group whose only rank is this process."""

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
    """Renderer whose tokens are bytes; 0 ends a reply."""

    stop = (0,)

    def render(self, messages: Any) -> tuple[int, ...]:
        return tuple("\n".join(m.content for m in messages).encode("latin-1"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("latin-1")


def make_model(folder: Path) -> Path:
    """Write a random model of two layers over bytes to `folder`; return the folder."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


class Group:
    """Trainer group with the methods of `TrainerGroup` and one rank, in this process.

    Torch's process group must be initialized.

    Attributes:
        updates: micro-batches of each update.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self.trainer = MegatronTrainer(spec)
        self.cost_model = CostModel.of(spec, cpu=True)
        self.updates: list[list[Microbatch]] = []

    async def update(
        self, microbatches: Sequence[Microbatch], at: int | None = None
    ) -> dict[str, float]:
        self.updates.append(list(microbatches))
        return self.trainer.update(microbatches, at)

    async def keep_version(self, version: int, count: int) -> None:
        self.trainer.keep_version(version, count)

    async def score(
        self,
        microbatches: Sequence[Microbatch],
        *,
        reference: bool = False,
        version: int | None = None,
    ) -> list[Tensor]:
        return self.trainer.score(microbatches, reference=reference, version=version)

    async def send_weights(self, route: SyncRoute, version: int) -> WeightUpdate:
        return handed_over(version)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        yield


class Engine(LocalEngine):
    """Embedded engine that reads new weights from a trainer in the same process."""

    starts = 1
    pause_s = 0.0
    version = 0
    group: Group | None = None

    async def exchange(self, requests: list[Request], aborts: list[int]) -> list[Report]:
        await asyncio.to_thread(failpoint, "token")  # in a thread, because a failpoint may wait
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
    """Trainer group in this process, with all methods that a whole training calls.

    Attributes:
        engines: engines of the present run, by policy.
    """

    engines: dict[str, Engine] = {}  # noqa: RUF012

    def __init__(self, name: str, spec: TrainerSpec, **_: Any) -> None:
        super().__init__(spec)
        if name in self.engines:  # a critic has no engine
            self.engines[name].group = self

    async def ready(self) -> None:
        pass

    async def update(
        self, microbatches: Sequence[Microbatch], at: int | None = None
    ) -> dict[str, float]:
        return self.trainer.update(microbatches, at)  # `updates` would grow without bound

    async def save(self, folder: Path) -> None:
        self.trainer.save(folder)

    async def restore(self, folder: Path) -> None:
        self.trainer.restore(folder)

    async def wait_written(self) -> Any:
        return self.trainer.wait_written()

    async def write_model(self, folder: Path) -> None:
        self.trainer.model.write(folder)


def engines_here(requests: Sequence[EngineRequest]) -> dict[str, Engine]:
    """Return an engine in this process for each policy of the requests; replaces `make_engines`."""
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
    """Return the devices of this process; replaces `find_devices`."""
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


def placement_here(devices: SimpleNamespace) -> SimpleNamespace:
    """Return a placement without options for Ray; replaces `DevicePlacement`."""
    options = {(group.policy, group.part): [{}] * group.devices for group in devices.worker_groups}
    return SimpleNamespace(options=options, nodes={}, fill=do_nothing)


def do_nothing(*_: object) -> None:
    pass


@contextmanager
def training_here(monkeypatch: pytest.MonkeyPatch, *, tracked: bool = False) -> Iterator[None]:
    """Replace Ray, so that `train` trains in this process; also MLflow, unless `tracked`."""
    replacements = {
        "TrainerGroup": HereGroup,
        "make_engines": engines_here,
        "DevicePlacement": placement_here,
    }
    for name, value in replacements.items():
        monkeypatch.setattr(workers, name, value)
    monkeypatch.setattr(train, "find_devices", devices_here)
    monkeypatch.setattr(train, "running_ray", lambda *_, **__: nullcontext())
    if not tracked:
        sender = SimpleNamespace(send=do_nothing, close=do_nothing, join=do_nothing)
        for name in ("MetricsSender", "TraceSender"):
            monkeypatch.setattr(logbook, name, lambda *_, **__: sender)
        monkeypatch.setattr(logbook, "start_training_record", do_nothing)
    init_process_groups(rank=0, threads=1)
    try:
        yield
    finally:
        destroy_process_groups()
