"""A run without trainers whose agents say what a script says."""

from pathlib import Path

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.training.checkpoint import Checkpoints, Identity
from mcore_mas.training.schedule import Schedule
from mcore_mas.training.session import Run
from rollout.config.build import build_env, build_orchestra, build_team
from rollout.engines.scripted import Script, ScriptedEngine
from rollout.records.trajectory import Task
from rollout.teams.team import EngineClient


class Bytes:
    """A renderer whose tokens are UTF-8 bytes; 0 ends a reply."""

    stop = (0,)

    def render(self, messages):
        return tuple("\n".join(m.content for m in messages).encode())

    def decode(self, token_ids):
        return bytes(token for token in token_ids if token).decode()


def make_run(tmp_path: Path, script: Script, *overrides: str) -> Run:
    """A run of the math team whose agents say what `script` says; the answer of task n is n."""
    settings = ["trainer.tasks_per_step=2", "trainer.group_size=2", "orchestra.options.max_loops=1", *overrides]
    values = resolve(["experiment=demo_math", f"results={tmp_path}", *settings])
    config = RunConfig.check(values, "test")
    tasks = [
        Task(id=str(n), prompt=f"task {n}", answers=(str(n),), env="math", source="s", split="train") for n in range(8)
    ]
    player = EngineClient(engine=ScriptedEngine(script), renderer=Bytes())
    return Run(
        config=config,
        team=build_team(config.agents, dict.fromkeys(config.policies, player)),
        orchestra=build_orchestra(config.orchestra),
        make_env=build_env(config.env),
        schedule=Schedule(tasks, 2, seed=1),
        validation=(),
        trainers={},
        critics={},
        engines={},
        remotes={},
        coach=None,
        kl={},
        checkpoints=Checkpoints(tmp_path / "checkpoints", Identity(run=config.run, models={}), keep=1),
        trajectories=tmp_path / "trajectories",
        models=tmp_path / "models",
        report=lambda step, metrics: None,
        tracking_run="",
    )


def box(answer: object) -> bytes:
    return b"\\boxed{%s}\0" % str(answer).encode()


def task_of(prompt) -> int:
    return int(bytes(prompt).decode().rpartition("task ")[2].split()[0])
