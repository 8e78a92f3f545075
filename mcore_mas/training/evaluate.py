"""Evaluation: avg@k and pass@k per data source, counted by task."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from mcore_mas.config.run import RunConfig
from mcore_mas.equations.statistics import bootstrap_interval
from mcore_mas.training.engine_factory import close_engines, make_engines, make_players, open_remotes, world
from mcore_mas.training.logbook import Reporter
from rollout.base.files import FolderError, write_json
from rollout.base.task_group import Watchdog
from rollout.config.build import build_orchestra, build_team
from rollout.config.sections import AgentConfig
from rollout.records.trajectory import Group, Status, Trajectory, read_tasks, write_trajectories
from rollout.teams.collect import CollectOptions, collect

_EVALUATION = -2  # the step in the seeds of evaluation trajectories


def evaluate(config_path: Path, state: str, out_path: Path) -> None:
    """Measure the policies' models ("base") or what training made of them ("trained") on the test tasks.

    Writes scores, means and 95 % intervals to `out_path`, and the trajectories beside it as parquet.

    Raises:
        FolderError: state is "trained" and training has not finished.
    """
    config = RunConfig.load(config_path)
    torch.set_num_threads(config.cluster.threads_per_process)
    groups = _played(config, state, out_path.parent)
    write_trajectories(out_path.with_suffix(".parquet"), (t for group in groups for t in group.trajectories))
    k = config.evaluation.samples
    write_json(out_path, {"run": config.run, "state": state, "k": k, **score(groups, k)})


def _played(config: RunConfig, state: str, folder: Path) -> list[Group]:
    """The test tasks, played by the models of a state; servers log in `folder`."""
    models = policy_models(config, state)
    tasks = read_tasks(config.folder / "tasks" / "test.parquet")
    total = len(tasks) * config.evaluation.samples
    remotes = open_remotes(config, folder / f"{state}-remotes")
    with ExitStack() as stack:
        make_env = stack.enter_context(world(config, f"evaluation/{state}-retriever"))
        engines = make_engines(config, models, folder / f"{state}-engines", trained=False)
        stack.callback(close_engines, engines)
        reporter = stack.enter_context(Reporter(f"{config.run} evaluate {state}", total))
        agents = {name: _measured(agent, config) for name, agent in config.agents.items()}
        team = build_team(agents, {**make_players(config, engines, models), **remotes})
        numbers = itertools.count(1)

        def count(_: Trajectory) -> None:
            done = next(numbers)
            if done % max(1, total // 10) == 0:
                reporter.step(done, {})

        async def play() -> list[Group]:
            async with AsyncExitStack() as closing:
                for remote in remotes.values():
                    closing.push_async_callback(remote.aclose)
                return await collect(
                    tasks,
                    team,
                    make_env,
                    build_orchestra(config.orchestra),
                    group_size=config.evaluation.samples,
                    seed=config.seed,
                    step=_EVALUATION,
                    options=CollectOptions(
                        limits=config.collection.limits,
                        watchdog=Watchdog(stall_s, reporter.note) if (stall_s := config.collection.stall_s) else None,
                        done=count,
                    ),
                )

        return asyncio.run(play())


def policy_models(config: RunConfig, state: str) -> dict[str, Path]:
    """The model folder of each policy in a state.

    Raises:
        FolderError: state is "trained" and training has not finished.
    """
    if state == "base":
        return {name: Path(model) for name, model in config.models.items()}
    done = config.folder / "train" / "done.json"
    if not done.is_file():
        raise FolderError(f"{done}: no such file; train first (`mcore-mas train --config {config.folder}/config.yaml`)")
    return {name: Path(folder) for name, folder in json.loads(done.read_text())["policies"].items()}


def score(groups: Sequence[Group], k: int) -> dict[str, Any]:
    """Scores by task, and rows of avg@k and pass@k per data source and over all, with 95 % bootstrap intervals.

    A task with a failed trajectory is not counted: what failed is unknown, not wrong. The number is in "failed_tasks".
    """
    tasks: list[dict[str, Any]] = []
    failed = 0
    for group in groups:
        if any(t.status is not Status.COMPLETED for t in group.trajectories):
            failed += 1
            continue
        scores = [t.success for t in group.trajectories]
        tasks.append({"task_id": group.task.id, "source": group.task.source, "scores": scores})
    sources = sorted({task["source"] for task in tasks})
    names = [*sources, "all"] if len(sources) > 1 else sources
    rows = [
        row
        for name in names
        for row in _rows(name, [task["scores"] for task in tasks if name in ("all", task["source"])], k)
    ]
    return {"failed_tasks": failed, "rows": rows, "tasks": tasks}


def _rows(dataset: str, scores: list[list[float]], k: int) -> list[dict[str, Any]]:
    per_task: Mapping[str, list[float]] = {
        f"avg@{k}": [fmean(task) for task in scores],
        f"pass@{k}": [max(task) for task in scores],
    }
    rows = []
    for metric, values in per_task.items():
        low, high = bootstrap_interval(values, f"{dataset}/{metric}")
        row = {"dataset": dataset, "metric": metric, "k": k, "value": fmean(values)}
        rows.append(row | {"ci_low": low, "ci_high": high, "n": len(values)})
    return rows


def _measured(agent: AgentConfig, config: RunConfig) -> AgentConfig:
    wanted = {"temperature": config.evaluation.temperature, "top_p": config.evaluation.top_p}
    return agent.model_copy(update={name: value for name, value in wanted.items() if value is not None})
