"""Evaluation of a team on the test tasks: avg@k, pass@k and maj@k per data source, with what failed beside them."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from mcore_mas.config.run import RunConfig
from mcore_mas.training.engine_factory import close_engines, make_engines, make_players, open_remotes, world
from mcore_mas.training.logbook import Reporter
from mcore_mas.training.measure import Scoreboard, measure, score_rows
from rollout.base.files import FolderError, write_json
from rollout.base.task_group import Watchdog
from rollout.config.sections import build_orchestra, build_team
from rollout.records.trajectory import Trajectory, read_tasks, write_trajectories
from rollout.teams.collect import CollectOptions, Collector

_EVALUATION = -2  # the step in the seeds of evaluation trajectories


class EvaluationError(RuntimeError):
    """Too much of an evaluation failed for a score: one line that says how much, why, and what to do."""


def evaluate(config_path: Path, state: str, out_path: Path) -> None:
    """Measure the policies' models ("base") or what training made of them ("trained") on the test tasks.

    Writes scores, means and 95 % intervals to `out_path`, and the trajectories beside it as parquet.

    Raises:
        FolderError: state is "trained" and training has not finished.
        EvaluationError: more than `evaluation.max_failed` of the trajectories failed, each time they were played.
    """
    config = RunConfig.load(config_path)
    torch.set_num_threads(config.cluster.threads_per_process)
    board = Scoreboard(read_tasks(config.folder / "tasks" / "test.parquet"), config.evaluation.samples)
    trajectories = _played(config, state, out_path.parent, board)
    write_trajectories(out_path.with_suffix(".parquet"), trajectories)
    _check_failures(config, board)
    tasks = board.tasks()
    head = {"run": config.run, "state": state, "k": board.k, "overlong_prompts": config.engine.overlong_prompts}
    write_json(out_path, {**head, **board.counts(), "rows": score_rows(tasks), "tasks": tasks})


def _check_failures(config: RunConfig, board: Scoreboard) -> None:
    if len(board.lost) > config.evaluation.max_failed * board.counts()["replies"]:
        raise EvaluationError(
            f"{board.losses()}; evaluation.max_failed is {config.evaluation.max_failed:g}: see to the cause and "
            "evaluate again, or raise it"
        )


def _played(config: RunConfig, state: str, folder: Path, board: Scoreboard) -> list[Trajectory]:
    """Have the board filled by the models of a state; servers log in `folder`."""
    models = policy_models(config, state)
    total = len(board.missing())
    remotes = open_remotes(config, folder / f"{state}-remotes")
    played: dict[str, Trajectory] = {}
    with ExitStack() as stack:
        make_env = stack.enter_context(world(config, f"evaluation/{state}-retriever"))
        engines = make_engines(config, models, folder / f"{state}-engines", trained=False)
        stack.callback(close_engines, engines)
        reporter = stack.enter_context(Reporter(f"{config.run} evaluate {state}", total))
        stall_s = config.collection.stall_s
        collector = Collector(
            team=build_team(config.agents, {**make_players(config, engines, models), **remotes}),
            make_env=make_env,
            orchestra=build_orchestra(config.orchestra),
            seed=config.seed,
            step=_EVALUATION,
            options=CollectOptions(
                sampling=config.evaluation.sampling,
                limits=replace(config.collection.limits, batch_s=None),  # an evaluation takes as long as it takes
                watchdog=Watchdog(stall_s, reporter.note) if stall_s else None,
            ),
        )

        async def keep(trajectory: Trajectory) -> None:
            played[trajectory.id] = trajectory
            if len(played) % max(1, total // 10) == 0:
                reporter.step(len(played), {})

        async def play() -> None:
            async with AsyncExitStack() as closing:
                for remote in remotes.values():
                    closing.push_async_callback(remote.aclose)
                in_flight = config.trajectories_in_flight(len(engines) * config.engine.servers)
                await measure(board, collector, in_flight=in_flight, retries=config.evaluation.retries, keep=keep)

        asyncio.run(play())
    return list(played.values())


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
