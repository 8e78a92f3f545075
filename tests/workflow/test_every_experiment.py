"""Every published experiment at the scale tiny: the real training, with trainers and engines in this process.

What starts processes is replaced (Ray, trackers), as it takes nearly all of a tiny run's time; tasks, models, teams,
environments, sandbox, retriever, rewards, credit, updates, weight sync and checkpoints are the real ones.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_mas.config.run import RunConfig
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.pipeline import prepare
from mcore_mas.pipeline.base_model import make_tiny_model
from mcore_mas.pipeline.paper_suite import paper_suite
from mcore_mas.pipeline.suite import Suite
from mcore_mas.planning.jobs import tenants_of
from mcore_mas.reports.paper_tables import table_names
from mcore_mas.retrieval.client import RetrievalClient
from mcore_mas.retrieval.sidecar import RetrieverSidecar
from mcore_mas.rollout.config.sections import build_env
from mcore_mas.rollout.environments.protocol import Env
from mcore_mas.rollout.records.trajectory import Task
from mcore_mas.training import crew, logbook, train
from tests.support.in_process import Engine, Group


class HereGroup(Group):
    """A trainer group whose one rank is here, with what a whole training asks of it."""

    engines: dict[str, Engine] = {}  # noqa: RUF012  (of the run under way)

    def __init__(self, name: str, spec: TrainerSpec, **_: Any) -> None:
        super().__init__(spec)
        if name in self.engines:  # a critic has none
            self.engines[name].group = self

    async def ready(self) -> None:
        pass

    async def save(self, folder: Path) -> None:
        self.trainer.save(folder)

    async def written(self) -> Any:
        return self.trainer.written()

    async def write_model(self, folder: Path) -> None:
        self.trainer.model.write(folder)


def engines_here(config: RunConfig, models: dict[str, str], *_: object, **__: object) -> dict[str, Engine]:
    sizes = {"rows": config.engine.slots, "max_length": config.engine.max_length}
    HereGroup.engines = {policy: Engine(model, **sizes) for policy, model in models.items()}
    return dict(HereGroup.engines)


def room_here(config: RunConfig) -> SimpleNamespace:
    return SimpleNamespace(kind="CPU", cpus=1, told={}, tenants=tenants_of(config, "CPU"))


def placed_here(room: SimpleNamespace, **_: object) -> SimpleNamespace:
    places = {(tenant.policy, tenant.part): [{}] * tenant.devices for tenant in room.tenants}
    return SimpleNamespace(options=places, nodes={}, fill=nothing)


def nothing(*_: object) -> None:
    pass


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Suite]:
    monkeypatch.chdir(tmp_path)
    loaded = Suite.load(paper_suite(table_names(), {"scale": "tiny"}))
    urls: dict[str, str] = {}

    @contextmanager
    def world(config: RunConfig, _: str) -> Iterator[Callable[[Task], Env]]:
        if config.retriever is None:
            yield build_env(config.env)
            return
        owner = loaded.tasks[config.run]  # whose retriever all use that share its index
        if owner not in urls:
            index = config.results / owner / "index"
            prepare.index_passages(config.folder / "config.yaml", index.parent / "tasks/passages.jsonl", index)
            urls[owner] = servers.enter_context(RetrieverSidecar(index, log_path=tmp_path / "retriever.log", threads=1))
        yield build_env(config.env, retriever=RetrievalClient(urls[owner], token_file=None))

    replaced = {"TrainerGroup": HereGroup, "make_engines": engines_here, "DevicePlacement": placed_here}
    for name, value in replaced.items():
        monkeypatch.setattr(crew, name, value)
    monkeypatch.setattr(train, "room_for", room_here)
    monkeypatch.setattr(train, "world", world)
    monkeypatch.setattr(train, "running_ray", lambda *_, **__: nullcontext())
    # MLflow and its traces
    silent = SimpleNamespace(run_id=None, log=nothing, finish=nothing, send=nothing, close=nothing)
    for name in ("open_tracker", "Traces"):
        monkeypatch.setattr(logbook, name, lambda *_: silent)
    init_process_groups(rank=0, threads=1)
    with ExitStack() as servers, contextlib.closing(SimpleNamespace(close=destroy_process_groups)):
        yield loaded


@pytest.mark.slow
@pytest.mark.multirank
def test_every_published_experiment_trains(suite: Suite) -> None:
    for path, format in suite.tiny_files.items():
        prepare.make_tiny_file(Path(path), format)
    for config_file in sorted({Path(path) for run in suite.runs for path in suite.models(run)}):
        make_tiny_model(config_file.parent)
    suite.write_configs(suite.runs)
    untrained = []
    for run in suite.runs:
        folder = Path("results/tiny") / run
        prepare.prepare_tasks(folder / "config.yaml", folder / "tasks")
        train.train(folder / "config.yaml")
        steps = [json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
        assert [step["step"] for step in steps] == [-1, 0, 1], run
        assert [step.get("rollout/failed", 0.0) for step in steps] == [0.0, 0.0, 0.0], run
        updates = Counter[str]()
        for step in steps:
            updates.update({key: int(step[key]) for key in step if re.fullmatch(r"policy/.+/updates", key)})
        untrained += [run] if not updates.total() else []
    assert len(suite.runs) == 92
    assert untrained == []
