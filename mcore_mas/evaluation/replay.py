"""Replay of a quarantined trajectory, with its recorded replies in place of an engine."""

import asyncio
import json
import shlex
import tempfile
from pathlib import Path

from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.run_environments import open_environments
from rollout.base.json_files import read_json
from rollout.base.lookup import LOCAL_OBJECTS
from rollout.config.agents import build_team
from rollout.records.trajectory import Trajectory
from rollout.teams.collect import CollectOptions, Collector, Deadlines
from rollout.teams.quarantine import Quarantined


def config_of_quarantined(file: Path) -> Path:
    """Return the config of the run in whose folder a trajectory is, such as RUN/train/quarantine/FILE."""
    return file.resolve().parent.parent.parent / "config.yaml"


def replay_remedy(config: RunConfig, file: Path, effect: str) -> str:
    """Return a sentence on how to replay a quarantined trajectory.

    The command cannot do it if the config names an object that exists only in the user's script. The
    sentence then says which one to move.

    Args:
        config: the run's config.
        file: file of the trajectory, which may be outside of the run's folder.
        effect: end of the sentence about the command, such as "plays this trajectory again".
    """
    config_text = config.model_dump_json()
    for name in LOCAL_OBJECTS:
        if name.startswith("here:") and json.dumps(name) in config_text:
            return (
                f"{file} has the replies and the traceback of a quarantined trajectory; before `mcore-mas replay` "
                f"can play it, move the orchestra, env, reward or parser '{name.removeprefix('here:')}' from your "
                "script into a module, and import it from there"
            )
    command = ["mcore-mas", "replay", str(file)]
    config_file = config.folder / "config.yaml"
    if config_file.resolve() != config_of_quarantined(file):
        command += ["--config", str(config_file)]
    return f"`{shlex.join(command)}` {effect}"


def replay(file: Path, config_path: Path) -> tuple[Trajectory, tuple[str, ...]]:
    """Play the trajectory of a quarantine file again.

    Args:
        file: file of a quarantined trajectory.
        config_path: config of the run.

    Returns:
        The trajectory, and the lines of the traceback if it is quarantined again, else ().

    Raises:
        RecordError: the file is not a quarantined trajectory.
        ConfigError: the config cannot be used.
        RetrievalError: the retriever does not start.
    """
    recorded = Quarantined.read(file)
    config = RunConfig.load(config_path)
    is_training_step = recorded.step >= 0
    branching = config.trainer.branching if is_training_step else None
    with (
        open_environments(config, "replay-retriever") as make_env,
        tempfile.TemporaryDirectory() as quarantine,
    ):
        collector = Collector(
            # A replay needs no policies: the replies are the recorded ones.
            team=recorded.team(build_team(config.agents, {})),
            make_env=make_env,
            orchestra=config.orchestra.call,
            seed=recorded.seed,
            step=recorded.step,
            options=CollectOptions(
                tree=branching,
                # `max_turns` is kept, because it may be the cause of the failure. There are no deadlines, so
                # that a replay can run in a debugger.
                deadlines=Deadlines(max_turns=config.collection.max_turns),
                quarantine=Path(quarantine),
                env=config.env.name,
            ),
        )
        trajectory = asyncio.run(collector.play(recorded.task, recorded.sample))
        traceback: list[str] = []
        for path in Path(quarantine).glob("*.json"):
            traceback += read_json(path)["traceback"]
    return trajectory, tuple(traceback)
