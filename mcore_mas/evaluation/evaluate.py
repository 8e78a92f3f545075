"""Evaluation of a team on the test tasks: avg@k, pass@k and maj@k per data source, with what failed beside them.

Seats say which model plays each agent: of this run, of another one, a folder or an API (cross-play). A quarantined
trajectory can be played again.
"""

import asyncio
import itertools
import json
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from mcore_mas import code_commit
from mcore_mas.config.policy import PolicyConfig
from mcore_mas.config.run import STATES, ConfigError, RunConfig
from mcore_mas.evaluation.engine_gpus import assign_engine_gpus, share_gpu_memory
from mcore_mas.evaluation.measure import Scoreboard, Shards, measure, score_rows
from mcore_mas.planning.machine import hide_gpus_from_cpu_run
from mcore_mas.runtime.engine_factory import (
    close_engines,
    make_engines,
    make_players,
    open_remotes,
    world,
)
from mcore_mas.runtime.recipe import identity_of_play
from mcore_mas.runtime.stop_signal import StopSignal
from mcore_mas.tracking.progress import ProgressReporter
from mcore_mas.tracking.stage_record import stage_record
from rollout.base.digests import check_tree
from rollout.base.files import ensure_writable
from rollout.base.json_files import read_record, sealed, write_json
from rollout.base.ownership import FolderError, owned
from rollout.base.text import nearest_hint
from rollout.base.watchdog import Watchdog
from rollout.config.agents import build_team
from rollout.config.tasks import prepared_tasks
from rollout.records.trajectory import Task, Trajectory
from rollout.teams.collect import CollectOptions, Collector
from rollout.teams.quarantine import Quarantined

_EVALUATION, _CHAT = -2, -3  # the step in the seeds of trajectories of an evaluation, and of a chat


class EvaluationError(RuntimeError):
    """Too much of an evaluation failed for a score: one line that says how much, why, and what to do."""


def evaluate(
    run: RunConfig | Path,
    state: str,
    out_path: Path,
    seats: Mapping[str, Any] = MappingProxyType({}),
    stop: StopSignal | None = None,
) -> dict[str, Any]:
    """Measure the team of a run, or of the one with this config, on its test tasks; gives what is written.

    Writes scores, means and 95 % intervals to `out_path`, and the trajectories as they come to the folder of its name
    without the suffix. An evaluation that was ended goes on from there.

    Args:
        state: `base` (the policies' first models), `trained`, or the name of a cell with `seats`.
        seats: which model plays an agent, see `seated`.
        stop: tells it to stop; by default signals do, in a main thread.

    Raises:
        FolderError: a run whose trained policies play has not finished its training, or another process evaluates.
        PlacementError: there are fewer GPUs than the engines need.
        EvaluationError: more than `evaluation.max_failed` of the trajectories failed, each time they were played.
        Stopped: it was told to stop.
    """
    config = seated(run if isinstance(run, RunConfig) else RunConfig.load(run), state, seats)
    torch.set_num_threads(config.cluster.threads_per_process or 1)
    board = Scoreboard(prepared_tasks(config.folder / "tasks", "test"), config.evaluation.samples)
    folder, commit = ensure_writable(out_path.with_suffix("")), code_commit()
    with owned(folder), stage_record(config.folder / "logs" / f"evaluate_{out_path.stem}.log"):
        _play(
            config,
            folder,
            board,
            stop or StopSignal(signals=threading.current_thread() is threading.main_thread()),
        )
    if len(board.lost) > config.evaluation.max_failed * board.replies:
        raise EvaluationError(
            f"{board.losses()}; evaluation.max_failed is {config.evaluation.max_failed:g}: see to the cause and "
            "evaluate again, or raise it"
        )
    tasks = board.tasks()
    head = {
        "run": config.run,
        "state": state,
        "k": board.k,
        "overlong_prompts": config.engine.overlong_prompts,
    }
    scores = {
        **head,
        **board.counts(),
        "commit": commit,
        "rows": score_rows(tasks),
        "tasks": tasks,
    }
    write_json(out_path, sealed(scores))
    return scores


def converse(
    run: RunConfig, state: str, prompts: Iterable[str]
) -> Generator[Trajectory, None, None]:
    """Have the run's team, `base` or `trained`, play what a person asks of it, one task after the other.

    Raises:
        FolderError: the training has not finished.
    """
    return _conversation(seated(run, state), prompts)  # which refuses before anything is asked


def _conversation(config: RunConfig, prompts: Iterable[str]) -> Generator[Trajectory, None, None]:
    with playing(config, f"{config.folder}/chat-") as (collector, runner):
        for number, prompt in enumerate(prompts):
            # an answer that no reply gives: environments of questions want one
            task = Task(
                id=f"chat-{number}",
                prompt=prompt,
                answers=("?",),
                env=config.env.name,
                source="chat",
                split="",
            )
            played = runner.run(collector.play(task, 0))
            turns = tuple(
                replace(turn, scores={}) for turn in played.turns
            )  # nobody knows what would be right
            yield replace(played, outcome=None, turns=turns)


@contextmanager
def playing(
    config: RunConfig, place: str, step: int = _CHAT
) -> Iterator[tuple[Collector, asyncio.Runner]]:
    """A config's team at its environments, and what runs the event loop that it is asked in; nobody trains it.

    Its remote models, engines and retriever write and log to paths that begin with `place`.

    Raises:
        PlacementError: there are fewer GPUs than the engines need.
        RemoteError, RetrievalError: a remote model cannot be asked, or the retriever does not start.
    """
    gpus = assign_engine_gpus(config)
    config = share_gpu_memory(config, gpus)
    remotes = open_remotes(config, Path(f"{place}remotes"))
    with hide_gpus_from_cpu_run(config), ExitStack() as stack:
        make_env = stack.enter_context(world(config, str(Path(f"{place}retriever").absolute())))
        engines = make_engines(
            config, config.models, Path(f"{place}engines"), trained=False, gpus=gpus
        )
        stack.callback(close_engines, engines)
        runner = stack.enter_context(asyncio.Runner())
        for remote in remotes.values():
            stack.callback(lambda own: runner.run(own.aclose()), remote)
        players = make_players(config, engines, gpus)
        team, orchestra = build_team(config.agents, {**players, **remotes}), config.orchestra.call
        yield (
            Collector(
                team=team, make_env=make_env, orchestra=orchestra, seed=config.seed, step=step
            ),
            runner,
        )


def _play(config: RunConfig, folder: Path, board: Scoreboard, stop: StopSignal) -> None:
    """Have the board filled, from `folder` as far as that goes; servers log beside it."""
    shards = Shards(folder, identity_of_play(config))
    for trajectory in shards.read():
        board.add(trajectory)
    if not board.missing():
        return
    with ExitStack() as stack:
        stack.callback(shards.flush)
        collector, runner = stack.enter_context(playing(config, f"{folder}-", _EVALUATION))
        first = board.replies - len(board.missing())
        reporter = stack.enter_context(
            ProgressReporter(f"{config.run} evaluate {folder.name}", board.replies, first)
        )
        stall_s = config.collection.stall_s
        options = CollectOptions(
            quarantine=folder.with_name(f"{folder.name}-quarantine"),
            sampling=config.evaluation.sampling,
            deadlines=config.collection.model_copy(
                update={"batch_s": None}
            ),  # it takes as long as it takes
            watchdog=Watchdog(stall_s, reporter.note) if stall_s else None,
            env=config.env.name,
        )
        collector = replace(collector, options=options)
        numbers = itertools.count(first + 1)

        async def keep(trajectory: Trajectory) -> None:
            done = next(numbers)
            if done % max(1, board.replies // 10) == 0:
                reporter.step(min(done, board.replies), {})
            await shards.keep(trajectory)

        async def play() -> None:
            stop.listen()
            in_flight = config.trajectories_in_flight(
                sum(map(len, assign_engine_gpus(config).values()))
            )
            measuring = measure(
                board, collector, in_flight=in_flight, retries=config.evaluation.retries, keep=keep
            )
            await stop.run_until_stopped(
                measuring, "; the same command goes on from what was played"
            )

        runner.run(play())


def seated(
    config: RunConfig, state: str, seats: Mapping[str, Any] = MappingProxyType({})
) -> RunConfig:
    """The run with each agent playing the model that an evaluation gives it, as a policy with that model's folder.

    Args:
        state: `base` or `trained`, of the agents without a seat; any other name is that of a cell, and means `trained`.
        seats: by agent `base`, `trained`, another run's name, for what trained its agent of the same name, or
            `run/agent`; or `{model: folder}`, or `{remote: ...}` with a remote model's settings.

    Raises:
        ConfigError: there is no such agent or run, a seat is none of these, or without seats there is no such state.
        FolderError: a run that is named has not finished its training.
    """
    if not seats and state not in STATES:
        raise ConfigError(
            f"state '{state}' of {config.run}: expected {' or '.join(STATES)}{nearest_hint(state, STATES)}"
        )
    unknown = seats.keys() - config.agents.keys()
    if unknown:
        raise ConfigError(
            f"seat of '{min(unknown)}', who is not in the team; agents: {', '.join(config.agents)}"
        )
    home = state if state in STATES else "trained"
    agents, policies = {}, {}
    for name, agent in config.agents.items():
        source = seats.get(name, home)
        own, policies_own = _policy(config, name, source)
        place = source.partition("/")[0] if isinstance(source, str) else f"seat.{name}"
        label = own if source == home else f"{place}.{own}"  # which tells it from the run's own
        policies[label] = policies_own
        agents[name] = agent.model_copy(update={"policy": label})
    return config.model_copy(update={"agents": agents, "policies": policies})


def read_seats(state: str, given: Sequence[str]) -> dict[str, Any]:
    """Seats written as `agent=who`, of an evaluation called `state`.

    Raises:
        ConfigError: one is not of that form, a name is not that of a cell, or it has no seats.
    """
    seats = dict(seat.partition("=")[::2] for seat in given)
    if not all(seats.values()):
        raise ConfigError(
            f"--seat {' '.join(given)}: expected AGENT=WHO, for example verifier=base"
        )
    if bool(seats) == (state in STATES):
        raise ConfigError(
            f"--state {state} with {len(seats)} seats; expected base or trained without, or another name with --seat"
        )
    try:
        return {agent: yaml.safe_load(who) for agent, who in seats.items()}
    except yaml.YAMLError as error:
        raise ConfigError(f"--seat: not YAML ({' '.join(str(error).split())})") from error


def _policy(config: RunConfig, agent: str, source: Any) -> tuple[str, PolicyConfig]:
    """(Name, settings) of the policy that a seat stands for."""
    own = config.agents[agent].policy
    if source in STATES:
        return own, _trained(config, own) if source == "trained" else config.policies[own]
    if isinstance(source, str):
        run, _, other = source.partition("/")
        elsewhere = RunConfig.load(config.results / run / "config.yaml")
        if (other or agent) not in elsewhere.agents:
            raise ConfigError(f"seat of '{agent}': run '{run}' has no agent '{other or agent}'")
        policy = elsewhere.agents[other or agent].policy
        return policy, _trained(elsewhere, policy)
    try:
        return own, PolicyConfig.model_validate(source)
    except ValidationError as error:
        raise ConfigError(
            f"seat of '{agent}': {error.errors()[0]['msg'].removeprefix('Value error, ')}; expected base, trained, a "
            "run, run/agent, {model: folder} or {remote: ...}"
        ) from error


def _trained(config: RunConfig, policy: str) -> PolicyConfig:
    """A policy with the model that training wrote; as it is where it is frozen."""
    done = config.folder / "train" / "done.json"
    if not done.is_file():
        raise FolderError(f"{done}: no such file; train first (`mcore-mas train {config.folder}`)")
    written, own = read_record(done, "policies"), config.policies[policy]
    if (folder := written["policies"].get(policy)) is None:
        return own
    check_tree(Path(folder), written.get("sha256", {}).get(policy, {}))
    return own.model_copy(update={"model": folder})


def replay(file: Path, config_path: Path) -> tuple[Trajectory, tuple[str, ...]]:
    """Play what `file` holds again, without an engine.

    Returns:
        What it came to, and the lines of the traceback if it is quarantined again, else ().

    Raises:
        RecordError: the file is no quarantined trajectory.
        ConfigError: the config cannot be used.
    """
    found = Quarantined.read(file)
    config = RunConfig.load(config_path)
    branching = config.trainer.branching if found.step >= 0 else None
    with world(config, "replay-retriever") as make_env, tempfile.TemporaryDirectory() as again:
        collector = Collector(
            team=found.team(build_team(config.agents, {})),
            make_env=make_env,
            orchestra=config.orchestra.call,
            seed=found.seed,
            step=found.step,
            options=CollectOptions(tree=branching, quarantine=Path(again), env=config.env.name),
        )
        played = asyncio.run(collector.play(found.task, found.sample))
        traces = [json.loads(path.read_text())["traceback"] for path in Path(again).glob("*.json")]
    return played, tuple(line for trace in traces for line in trace)
