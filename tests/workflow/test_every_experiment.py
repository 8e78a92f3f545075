"""Trainings of published experiments at the tiny scale, with trainers and engines in this process.

Ray and the trackers are replaced, because starting their processes takes most of the time of a tiny run. Tasks,
models, teams, environments, the sandbox, the retriever, rewards, credit, updates, weight sync and checkpoints are real.
One experiment of each system is evaluated too. `test_paper_targets.py` runs one experiment with all its processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.config.experiments import experiments
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
from tests.support.run_folder import metrics_of

pytestmark = pytest.mark.usefixtures("forked_programs")

EVALUATED = (
    "drmas_t1_4b_shared_drmas",
    "marti_single_ttrl",
    "strongermas_t3_tool_alone",
    "unitymas_t3_hotpotqa_m_ask_1_5b",
)


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Suite]:
    """Yield the suite of all tables, whose runs can be trained in this process."""
    monkeypatch.chdir(tmp_path)
    loaded = Suite.load(paper_suite(table_names(), {"scale": "tiny"}))
    urls: dict[str, str] = {}  # of retrievers, by the run that owns the index

    @contextmanager
    def open_environments(config: RunConfig, _: str) -> Iterator[Callable[[Task], Env]]:
        if config.retriever is None:
            yield build_env(config.env)
            return
        owner = loaded.task_owner[config.run]
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


def parts_of(run: Mapping[str, Any]) -> set[str]:
    """Return the settings of a run that select its team, environment, reward, estimator and training tasks, as JSON.

    Runs with the same parts differ in their policies, whose models are equal at the tiny scale, and in the agents that
    share one; `test_teams_train.py` trains every team with several policies. Some have other test tasks.
    """
    parts = {name: run[name] for name in ("orchestra", "env", "reward", "advantage")}
    parts["tasks"] = run["data"]["train"]
    parts["roles"] = {
        name: (agent["role"], agent["loss_weight"]) for name, agent in run["agents"].items()
    }
    return {json.dumps([name, part], sort_keys=True) for name, part in parts.items()}


@pytest.mark.slow
@pytest.mark.multirank
def test_every_part_of_the_published_experiments_trains(suite: Suite) -> None:
    """All experiments are composed, and those that have a part which no earlier one has are trained."""
    published = {name for name in experiments() if not name.startswith("demo_")}
    assert suite.runs.keys() == published
    assert {values["trainer"]["steps"] for values in suite.runs.values()} == {2}
    trained = []
    trained_parts: set[str] = set()
    for run, values in suite.runs.items():
        parts = parts_of(values)
        if not parts <= trained_parts:
            trained.append(run)
            trained_parts |= parts
    assert len(trained) == 40
    for path, format in suite.tiny_files.items():
        prepare.make_tiny_file(Path(path), format)
    config_files: set[Path] = set()
    for run in trained:
        config_files |= {Path(path) for path in suite.model_files(run)}
    for config_file in sorted(config_files):
        make_tiny_model(config_file.parent)
    suite.write_configs(trained)
    without_updates = []
    for run in trained:
        folder = Path("results/tiny") / run
        prepare.prepare_tasks(folder / "config.yaml", folder / "tasks")
        train.train(folder / "config.yaml")
        rows = metrics_of(folder)
        assert [row["step"] for row in rows] == [-1, 0, 1], run
        updates = 0
        for row in rows:
            assert row.get("rollout/failed", 0.0) == 0.0, run
            updates += sum(row[name] for name in row if re.fullmatch(r"policy/.+/updates", name))
        if not updates:
            without_updates.append(run)
        if run in EVALUATED:
            scores_file = folder / "evaluation" / "trained.json"
            evaluate.evaluate(folder / "config.yaml", "trained", scores_file)
            scores = json.loads(scores_file.read_text())
            assert scores["tasks"], run
            assert scores["failed"] == {}, run
    assert without_updates == []
    assert set(EVALUATED) <= set(trained)
