"""Evaluation of a team on the test tasks: avg@k, pass@k and maj@k by data source.

`evaluate` writes the scores to a JSON file, and every trajectory to a folder beside it.
"""

import itertools
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mcore_mas import code_commit
from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation.identity import evaluation_identity
from mcore_mas.evaluation.measure import Scoreboard, measure, score_rows
from mcore_mas.evaluation.replay import replay_remedy
from mcore_mas.evaluation.running_team import running_team
from mcore_mas.evaluation.seats import config_with_seats, player_names
from mcore_mas.evaluation.strategies import game_of, strategy_metrics
from mcore_mas.evaluation.trajectory_shards import TrajectoryShards
from mcore_mas.runtime.stop_signal import Stopped, StopSignal
from mcore_mas.tracking.progress import ProgressReporter
from mcore_mas.tracking.stage_record import stage_record
from rollout.base.files import ensure_writable
from rollout.base.json_files import sealed, write_json
from rollout.base.ownership import owned
from rollout.base.watchdog import Watchdog
from rollout.config.tasks import prepared_tasks
from rollout.records.trajectory import EVALUATION_STEP, Trajectory
from rollout.teams.collect import CollectOptions
from rollout.teams.quarantine import quarantine_path


class EvaluationError(RuntimeError):
    """Error of an evaluation in which too many trajectories failed; the message is one line."""


def evaluate(
    run: RunConfig | Path,
    state: str,
    out_path: Path,
    seats: Mapping[str, Any] = MappingProxyType({}),
    stop: StopSignal | None = None,
    *,
    address: str | None = None,
) -> dict[str, Any]:
    """Evaluate the team of a run on its test tasks; return the scores as they are written.

    The scores, with means and 95 % intervals, are written to `out_path`. Trajectories are written
    during the evaluation, to the folder of the same name without suffix; an evaluation that was
    interrupted continues from there.

    Args:
        run: config of the run, or its file.
        state: "base", "trained", or a name for the evaluation if there are `seats`.
        out_path: JSON file of the scores.
        seats: which model plays an agent; see `config_with_seats`.
        stop: stops the evaluation; None: signals stop it, if this is the main thread.
        address: address of a running Ray, whose nodes run SGLang's servers; None: this machine.

    Raises:
        ConfigError: the run's config cannot be used, or there is no such state, agent or seat.
        RecordError: the test tasks are missing or damaged.
        FolderError: a run whose trained policies play has not finished its training, or a file of its
            models has changed since; a model folder is missing; the folder of the trajectories cannot be
            written; or another process evaluates to this file.
        ClusterError: the Ray at `address` cannot be joined.
        PlacementError: there are fewer GPUs than the engines need.
        RemoteError, RetrievalError: a remote model or the retriever cannot be used.
        EngineError: an engine cannot start, or does not report the likeliest tokens by which the
            strategy in a zero-sum game is measured.
        EvaluationError: more than the share `evaluation.max_failed` of the trajectories failed, also
            when they were played again.
        Stopped: a signal or `stop` ended the evaluation.
    """
    run_config = run if isinstance(run, RunConfig) else RunConfig.load(run)
    config = config_with_seats(run_config, state, seats)
    players = player_names(run_config, state, seats)
    if stop is None:
        is_main_thread = threading.current_thread() is threading.main_thread()
        stop = StopSignal(signals=is_main_thread)
    torch.set_num_threads(config.cluster.threads_per_process or 1)
    tasks = prepared_tasks(config.folder / "tasks", "test")
    board = Scoreboard(tasks, config.evaluation.samples)
    folder = ensure_writable(out_path.with_suffix(""))
    commit = code_commit()
    log = config.folder / "logs" / f"evaluate_{out_path.stem}.log"
    with owned(folder), stage_record(log):
        # This adds the trajectories to the board.
        strategy_scores = _play_missing(config, folder, board, stop, address or "local")

    _check_failures(board, config, folder)
    task_rows = board.task_rows()
    scores = {
        "run": config.run,
        "state": state,
        "players": players,
        "k": board.k,
        "overlong_prompts": config.engine.overlong_prompts,
        **board.counts(),
        "commit": commit,
        "strategy": strategy_scores,
        "rows": score_rows(task_rows),
        "tasks": task_rows,
    }
    write_json(out_path, sealed(scores))
    return scores


def _check_failures(board: Scoreboard, config: RunConfig, folder: Path) -> None:
    """Raise EvaluationError if more than the share `evaluation.max_failed` of the trajectories has no score.

    Args:
        board: scores of the evaluation.
        config: config of the evaluation.
        folder: folder of the trajectories.
    """
    max_failed = config.evaluation.max_failed
    if len(board.lost) <= max_failed * board.expected_replies:
        return
    remedy = "see to the cause"
    if board.quarantined:
        task_id, sample = board.quarantined[0]
        file = quarantine_path(_quarantine_folder(folder), EVALUATION_STEP, task_id, sample)
        effect = f"shows the error of sample {sample} of task {task_id}"
        remedy = f"mend the code; {replay_remedy(config, file, effect)}"
    raise EvaluationError(
        f"{board.describe_losses()}; evaluation.max_failed is {max_failed:g}: {remedy}; "
        "then evaluate again, or raise evaluation.max_failed"
    )


def _quarantine_folder(folder: Path) -> Path:
    """Return the folder of quarantined trajectories beside that of an evaluation's trajectories."""
    return folder.with_name(f"{folder.name}-quarantine")


def _play_missing(
    config: RunConfig, folder: Path, board: Scoreboard, stop: StopSignal, address: str
) -> dict[str, float]:
    """Fill a scoreboard with the trajectories in a folder, and play those that are missing.

    Logs of servers are written beside the folder.

    Returns:
        Metrics of the team's strategy, if it plays a zero-sum game; see `strategy_metrics`.
    """
    shards = TrajectoryShards(folder, evaluation_identity(config))
    for trajectory in shards.read():
        board.add(trajectory)
    missing = len(board.missing())
    game = game_of(config)
    if not missing and game is None:
        return {}

    total = board.expected_replies
    finished = total - missing
    with ExitStack() as stack:
        stack.callback(shards.flush)
        team = stack.enter_context(running_team(config, f"{folder}-", EVALUATION_STEP, address))
        reporter = stack.enter_context(
            ProgressReporter(f"{config.run} evaluate {folder.name}", total, finished)
        )
        stall_s = config.collection.stall_s
        options = CollectOptions(
            quarantine=_quarantine_folder(folder),
            sampling=config.evaluation.sampling,
            # An evaluation as a whole may take any time.
            deadlines=config.collection.model_copy(update={"batch_s": None}),
            watchdog=Watchdog(stall_s, reporter.note) if stall_s else None,
            env=config.env.name,
        )
        collector = replace(team.collector, options=options)
        finished_numbers = itertools.count(finished + 1)
        report_every = max(1, total // 10)

        async def write_and_report(trajectory: Trajectory) -> None:
            number = next(finished_numbers)
            if number % report_every == 0:
                # Trajectories that are played again are counted again, so `number` may exceed `total`.
                reporter.step(min(number, total), {})
            await shards.add(trajectory)

        async def measure_all() -> dict[str, float]:
            await measure(
                board,
                collector,
                in_flight=config.trajectories_in_flight(team.servers),
                retries=config.evaluation.retries,
                on_trajectory=write_and_report,
            )
            return {} if game is None else await strategy_metrics(collector.team, game)

        async def play() -> dict[str, float]:
            stop.listen()
            message = "; the same command continues from what was played"
            try:
                return await stop.run_until_stopped(measure_all(), message)
            except Stopped as stopped:
                shards.flush()
                stop.end_soon(stopped)
                raise
            finally:
                stop.finish()

        return team.runner.run(play())
