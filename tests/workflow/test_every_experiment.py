"""Every published experiment at the scale tiny: the real training, with trainers and engines in this process.

One of each system is evaluated too; `test_paper_targets.py` runs one of them with all its processes.

What starts processes is replaced (Ray, trackers), as it takes nearly all of a tiny run's time; tasks, models, teams,
environments, sandbox, retriever, rewards, credit, updates, weight sync and checkpoints are the real ones.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation import evaluate, running_team
from mcore_mas.pipeline import passage_index, prepare
from mcore_mas.pipeline.base_model import make_tiny_model
from mcore_mas.pipeline.paper_suite import paper_suite
from mcore_mas.pipeline.suite import Suite
from mcore_mas.reports.paper_tables import table_names
from mcore_mas.training import train
from retrieval.client import RetrievalClient
from retrieval.sidecar import RetrieverSidecar
from rollout.config.environment import build_env
from rollout.environments.protocol import Env
from rollout.records.trajectory import Task
from tests.support.in_process import training_here

pytestmark = pytest.mark.usefixtures("forked_programs")

EVALUATED = (
    *("drmas_t1_4b_shared_drmas", "marti_single_ttrl"),
    *("strongermas_t3_tool_alone", "unitymas_f5_m_ask_3b_shared"),
)


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Suite]:
    monkeypatch.chdir(tmp_path)
    loaded = Suite.load(paper_suite(table_names(), {"scale": "tiny"}))
    urls: dict[str, str] = {}

    @contextmanager
    def open_environments(config: RunConfig, _: str) -> Iterator[Callable[[Task], Env]]:
        if config.retriever is None:
            yield build_env(config.env)
            return
        owner = loaded.task_owner[config.run]  # whose retriever all use that share its index
        if owner not in urls:
            index = config.results / owner / "index"
            passage_index.index_passages(
                config.folder / "config.yaml", index.parent / "tasks/passages.jsonl", index
            )
            urls[owner] = servers.enter_context(
                RetrieverSidecar(index, log_path=tmp_path / "retriever.log")
            )
        yield build_env(config.env, retriever=RetrievalClient(urls[owner], token_file=None))

    with ExitStack() as servers, training_here(monkeypatch):
        for module in (train, running_team):
            monkeypatch.setattr(module, "open_environments", open_environments)
        yield loaded


@pytest.mark.slow
@pytest.mark.multirank
def test_every_published_experiment_trains(suite: Suite) -> None:
    for path, format in suite.tiny_files.items():
        prepare.make_tiny_file(Path(path), format)
    for config_file in sorted(
        {Path(path) for run in suite.runs for path in suite.model_files(run)}
    ):
        make_tiny_model(config_file.parent)
    suite.write_configs(suite.runs)
    untrained = []
    for run in suite.runs:
        folder = Path("results/tiny") / run
        prepare.prepare_tasks(folder / "config.yaml", folder / "tasks")
        train.train(folder / "config.yaml")
        steps = [
            json.loads(line)
            for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()
        ]
        assert [step["step"] for step in steps] == [-1, 0, 1], run
        assert [step.get("rollout/failed", 0.0) for step in steps] == [0.0, 0.0, 0.0], run
        updates = Counter[str]()
        for step in steps:
            updates.update(
                {key: int(step[key]) for key in step if re.fullmatch(r"policy/.+/updates", key)}
            )
        untrained += [run] if not updates.total() else []
        if run in EVALUATED:
            scores = folder / "evaluation" / "trained.json"
            evaluate.evaluate(folder / "config.yaml", "trained", scores)
            found = json.loads(scores.read_text())
            assert found["tasks"] and found["failed"] == {}, run
    assert len(suite.runs) == 92 and set(EVALUATED) <= set(suite.runs)
    assert untrained == []
