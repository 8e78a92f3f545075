"""Distillation of a whole team into one model, which learns from the team's right replies.

`distill` fine-tunes a model on the recorded trajectories of a finished run, writes it as a run of a
team of one, evaluates it, and compares it with the team.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

from mcore_mas.config.policy import PolicyConfig
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.credit.samples import Sample, weigh
from mcore_mas.equations.losses import Objective
from mcore_mas.evaluation.evaluate import evaluate
from mcore_mas.evaluation.seats import config_with_seats
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from mcore_mas.pipeline.cold_start import POLICY, demonstration_sample
from mcore_mas.planning.machine import hide_gpus_from_cpu_run
from mcore_mas.reports.evaluation_files import read_score_rows
from mcore_mas.runtime.players import make_renderers
from mcore_mas.runtime.run_environments import open_environments
from mcore_mas.tracking.progress import ProgressReporter
from rollout.base.files import atomic_folder, check_output_path
from rollout.base.ownership import FolderError
from rollout.config.agents import AgentConfig, build_role, build_team
from rollout.config.tasks import prepared_tasks
from rollout.engines import ChatState, PolicyReply
from rollout.records.files import read_tasks, read_trajectories, write_tasks
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import (
    EMPTY_COMPLETION,
    Demonstration,
    Message,
    Sampling,
    Status,
    Task,
    Trajectory,
    Turn,
)
from rollout.tasks.splits import SPLITS
from rollout.teams.collect import Collector

STUDENT = "student"  # policy of the one model
_TEACHER = "teacher"  # policy that teaches it in a further training
_TEACHER_KEYS = ("chat_template", "chat_template_kwargs", "overrides")
_LONE_ROLE = "lone_solver"  # role of a solver whose whole reply is its answer
_TRIED_TRAJECTORIES = 20  # trajectories that show which agent gives the team's answers
_AGENT = "player"  # agent of the orchestra `single`


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Settings of a distillation.

    Attributes:
        agent: agent whose last reply is the team's answer; None: the one whose last replies are right most
            often, of those that no remote model plays.
        role: role whose parser reads the student's answers; None: the agent's own, or that of a lone
            solver, whichever finds more replies right.
        turns: "final": learn the team's answers; "all": learn all other turns too, with their prompts.
        start: model of the agent's policy that the student starts from: "trained", or "base", the model
            before training. With "base", the config of the new run names the trained model as the
            student's teacher, for a further training.
        newest: number of training steps, the last ones, whose trajectories are read; None: all.
        lr: learning rate after the warm-up.
        epochs: number of passes over the replies.
        batch: number of replies per update.
    """

    agent: str | None = None
    role: str | None = None
    turns: Literal["final", "all"] = "final"
    start: Literal["trained", "base"] = "trained"
    newest: int | None = None
    lr: float = 1e-5
    epochs: int = 2
    batch: int = 64


@dataclass(frozen=True, kw_only=True)
class TeamCost:
    """Score and cost of a team in an evaluation.

    Attributes:
        accuracy: avg@k over all tasks.
        sampled: mean number of tokens that a trajectory samples.
        read: mean number of tokens in the prompts of a trajectory.
    """

    accuracy: float
    sampled: float
    read: float


def distill(run: Path, to: Path, settings: DistillSettings) -> tuple[TeamCost, TeamCost]:
    """Distil the team of a finished run into one model; return the cost of the team and of the model.

    Writes `to` as the folder of a run: config.yaml, tasks, the model in bootstrap/model, and the
    evaluation of this model. `mcore-mas train` continues it by reinforcement learning. If the team's
    run has no evaluation of the trained team, it is added to that run.

    Args:
        run: folder of the run, with the trajectories of its training.
        to: folder that does not exist.
        settings: settings of the distillation.

    Raises:
        ConfigError: the settings do not fit the run, or no reply of the team can be learned.
        FolderError: the run has not finished its training, or `to` exists or cannot be written.
    """
    config = RunConfig.load(run / "config.yaml")
    trained_config = config_with_seats(config, "trained")
    check_output_path(to)
    if to.exists():
        raise FolderError(f"{to}: something is there already; name another folder with --to")
    if settings.agent not in (None, *config.agents):
        raise ConfigError(
            f"--agent {settings.agent}: not in the team; agents: {', '.join(config.agents)}"
        )
    local_agents = _local_agents(config)
    if settings.agent not in (None, *local_agents):
        raise ConfigError(
            f"--agent {settings.agent}: played by a remote model, from which no model can start; "
            f"name one of {', '.join(local_agents)}"
        )
    trajectories = _read_successes(run, settings.newest)
    agent, role = _answering_agent(config, to, trajectories, settings)
    policy = config.agents[agent].policy
    trained_model = trained_config.policies[policy].model
    starts_trained = settings.start == "trained"
    start_model = trained_model if starts_trained else config.policies[policy].model
    teacher = None if starts_trained else trained_model
    student = _student_config(config, to, agent, role, teacher)
    renderer = make_renderers(student, {STUDENT: start_model})[STUDENT]
    with atomic_folder(to.absolute()) as partial, hide_gpus_from_cpu_run(config):
        (partial / "tasks").mkdir()
        for split in SPLITS:
            tasks = read_tasks(config.folder / "tasks" / f"{split}.parquet")
            write_tasks(partial / "tasks" / f"{split}.parquet", tasks)
        values = student.model_dump(mode="json")
        (partial / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))

        demonstrations = _right_replies(student, config, trajectories, agent)
        if not demonstrations:
            raise ConfigError(
                f"{run}: in {len(trajectories)} trajectories with a right answer, no last reply of "
                f"'{agent}' is right in role '{role}'; name another --agent or --role"
            )
        samples = [demonstration_sample(item, renderer) for item in demonstrations]
        print(f"{len(samples)} right answers of {agent}")
        if settings.turns == "all":
            other_turns = list(_other_turns(trajectories))
            print(f"{len(other_turns)} other turns")
            samples += other_turns
        _fine_tune(student, start_model, samples, settings, partial / "bootstrap" / "model")

    evaluate(student, "base", to / "evaluation" / "base.json")
    team_scores = config.folder / "evaluation" / "trained.json"
    if not team_scores.is_file():
        evaluate(config, "trained", team_scores)
    return _cost(team_scores), _cost(to / "evaluation" / "base.json")


def describe(team: TeamCost, student: TeamCost) -> list[str]:
    """Return lines that compare the model with the team."""
    lines = [
        f"{name}: {100 * cost.accuracy:.1f} % right, {cost.sampled:.1f} tokens sampled and "
        f"{cost.read:.1f} read per task"
        for name, cost in (("team", team), ("one model", student))
    ]
    accuracy = student.accuracy / team.accuracy if team.accuracy else 0.0
    sampled = student.sampled / team.sampled
    total = (student.sampled + student.read) / (team.sampled + team.read)
    lines.append(
        f"one model compared with the team: {accuracy:.0%} of the accuracy, {sampled:.0%} of the tokens sampled, "
        f"{total:.0%} of all tokens"
    )
    return lines


def _read_successes(run: Path, newest: int | None) -> list[Trajectory]:
    """Return the recorded training trajectories that completed with success 1.

    Those without a turn that led to the outcome are left out.

    Args:
        run: folder of the run.
        newest: number of newest steps whose trajectories are read; None: all steps.

    Raises:
        ConfigError: there are none.
    """
    files = sorted((run / "train" / "trajectories").glob("*.parquet"))
    if newest is not None:
        files = files[-newest:]
    successes: list[Trajectory] = []
    for file in files:
        for trajectory in read_trajectories(file):
            is_success = trajectory.status is Status.COMPLETED and trajectory.success == 1
            if is_success and trajectory.path:
                successes.append(trajectory)
    if not successes:
        raise ConfigError(
            f"{run}: {len(files)} files of trajectories have no success to learn from; train the team "
            "first, with trainer.keep_trajectories: null"
        )
    return successes


def _local_agents(config: RunConfig) -> list[str]:
    """Return the agents that no remote model plays."""
    return [
        name
        for name, agent in config.agents.items()
        if config.policies[agent.policy].remote is None
    ]


def _answering_agent(
    config: RunConfig, to: Path, trajectories: Sequence[Trajectory], settings: DistillSettings
) -> tuple[str, str]:
    """Return the agent and the role with the most right replies in the first trajectories."""
    counts: dict[tuple[str, str], int] = {}
    agents = [settings.agent] if settings.agent else _local_agents(config)
    for agent in agents:
        roles = [config.agents[agent].role or agent, _LONE_ROLE]
        if settings.role:
            roles = [settings.role]
        for role in roles:
            student = _student_config(config, to, agent, role)
            replies = _right_replies(student, config, trajectories[:_TRIED_TRAJECTORIES], agent)
            counts[agent, role] = len(replies)
    return max(counts, key=counts.__getitem__)


def _student_config(
    config: RunConfig, to: Path, agent: str, role: str, teacher: str | None = None
) -> RunConfig:
    """Return the config of a run in which one model answers in one call, with an agent's prompt.

    Args:
        config: config of the team's run.
        to: folder of the new run.
        agent: agent whose prompt and policy settings the model gets.
        role: role whose parser reads the model's answers.
        teacher: model folder of a teacher for a training of the new run; None: it has none.
    """
    speaker = config.agents[agent]
    prompts = build_role(agent, speaker)
    fields: dict[str, Any] = speaker.model_dump(
        mode="json", include=AgentConfig.model_fields.keys() - {"tools", "chats"}
    )
    fields |= {
        "policy": STUDENT,
        "role": role,
        "system": prompts.system,
        "user": problem_only(prompts.user),
    }
    policy = config.policies[speaker.policy].model_dump(mode="json", exclude={"teacher", "critic"})
    policy |= {"model": str(to / "bootstrap" / "model"), "share_base": False}
    policies = {STUDENT: policy}
    if teacher is not None:
        policies[_TEACHER] = {key: policy[key] for key in _TEACHER_KEYS} | {"model": teacher}
        policies[STUDENT] = policy | {"teacher": {"policy": _TEACHER}}
    values = config.model_dump(mode="json") | {
        "run": to.name,
        "results": str(to.parent),
        "orchestra": {"name": "single", "options": {"max_turns": 1}},
        "agents": {_AGENT: fields},
        "policies": policies,
        "reward": {"name": "shared_outcome"},
        "advantage": {"name": "grpo"},
        "filter": None,
        "coach": None,
        "cold_start": None,
    }
    values["trainer"] |= {"alternate": None, "branching": None, "replays": None}
    retriever = config.retriever
    if retriever is not None and not retriever.urls and retriever.folder is None:
        # The new run has no index of its own, so it searches the one that the team's run has built.
        index = str(config.folder / "index")
        values["retriever"] |= {"folder": index, "passages": None}
    return RunConfig.from_values(values, str(to / "config.yaml"))


class _EmptySlots(dict[str, str]):
    """Slots of a template: that of the problem stays, and the others are empty.

    Search teams call it `question`; the student's orchestra calls it `problem`.
    """

    def __missing__(self, name: str) -> str:
        return "{problem}" if name in ("problem", "question") else ""


def problem_only(template: str) -> str:
    """Return a template in which all slots but that of the problem are filled with nothing."""
    # Doubled braces stand for single ones. Filling would replace them, and they must stay doubled
    # because the student's template is filled too, so \0 and \1 take their place meanwhile.
    filled = template.replace("{{", "\0").replace("}}", "\1").format_map(_EmptySlots())
    return filled.replace("\0", "{{").replace("\1", "}}")


@dataclass(frozen=True, slots=True)
class _RecordedPolicy:
    """`PolicyClient` that gives one recorded reply."""

    text: str

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        return PolicyReply(
            text=self.text, raw=self.text, prompt_ids=(), completion=EMPTY_COMPLETION
        )


def _right_replies(
    student: RunConfig, config: RunConfig, trajectories: Iterable[Trajectory], agent: str
) -> list[Demonstration]:
    """Return the agent's answers that are right as replies of the student, each with the student's prompt.

    The answers are the agent's last replies in the trajectories; equal answers to a task count once.
    To find out whether an answer is right, the student plays the task with this reply.

    Args:
        student: config of the student's run.
        config: config of the team's run, with the tasks and their environment.
        trajectories: trajectories of the team.
        agent: agent whose answers are tried.
    """
    tasks = {task.id: task for task in prepared_tasks(config.folder / "tasks", "train")}
    replies: dict[tuple[str, str], Task] = {}
    for trajectory in trajectories:
        turn = next((turn for turn in reversed(trajectory.path) if turn.agent == agent), None)
        if turn is not None and turn.finish_reason == "stop":
            replies[trajectory.task_id, turn.text] = tasks[trajectory.task_id]

    async def play() -> list[Demonstration]:
        demonstrations = []
        with open_environments(config, "distill/retriever") as make_env:
            for (_, text), task in replies.items():
                collector = Collector(
                    team=build_team(student.agents, {STUDENT: _RecordedPolicy(text)}),
                    make_env=make_env,
                    orchestra=student.orchestra.call,
                    seed=student.seed,
                    step=0,
                )
                trajectory = await collector.play(task, 0)
                if trajectory.status is Status.COMPLETED and trajectory.success == 1:
                    prompt = trajectory.turns[0].messages
                    reply = Message(role="assistant", content=text)
                    demonstrations.append(Demonstration(agent=agent, messages=(*prompt, reply)))
        return demonstrations

    return asyncio.run(play())


def _other_turns(trajectories: Iterable[Trajectory]) -> Iterator[Sample]:
    """Yield the well-formed turns that led to each outcome, except the last one, with their recorded tokens."""
    for trajectory in trajectories:
        for turn in trajectory.path[:-1]:
            if turn.valid and turn.completion_ids:
                yield _turn_sample(turn)


def _turn_sample(turn: Turn) -> Sample:
    """Return a recorded turn as a sample whose reply is trained, like that of `demonstration_sample`."""
    return Sample(
        policy=POLICY,
        agent=POLICY,
        task="",
        trajectory="",
        turn=0,
        prompt_ids=turn.prompt_ids,
        completion_ids=turn.completion_ids,
    )


def _fine_tune(
    config: RunConfig, start: str, samples: Sequence[Sample], settings: DistillSettings, to: Path
) -> None:
    """Fine-tune a model on the samples in this process, on one rank; write it to a folder."""
    policy: PolicyConfig = config.policies[STUDENT]
    updates = settings.epochs * ceil(len(samples) / settings.batch)
    spec = TrainerSpec(
        model=start,
        lr=settings.lr,
        warmup_steps=min(updates // 10, 50),
        schedule="cosine",
        decay_steps=updates + 1,
        bf16=policy.bf16,
        recompute=policy.recomputation,
        objective=Objective(loss="cross_entropy"),
    )
    init_process_groups(rank=0, threads=config.cluster.threads_per_process or 1)
    try:
        trainer = MegatronTrainer(spec)
        step = 0
        with ProgressReporter(f"{config.run} distill", updates, 0) as reporter:
            for epoch in range(settings.epochs):
                order = list(samples)
                Random(derive_seed(config.seed, "distill", epoch)).shuffle(order)
                for first in range(0, len(order), settings.batch):
                    batch = weigh(order[first : first + settings.batch], {POLICY: 1.0})
                    metrics = trainer.update(pack(batch, config.trainer.microbatch_tokens))
                    step += 1
                    if step % 20 == 0 or step == updates:
                        reporter.step(step, {"loss": metrics[f"agent/{POLICY}/loss"]})
        trainer.model.write(to)
    finally:
        destroy_process_groups()


def _cost(evaluation: Path) -> TeamCost:
    """Return the score and the cost of a team, from the files of an evaluation."""
    # The last row of a metric is its mean over all data sources.
    accuracies = [row.value for row in read_score_rows(evaluation) if row.metric.startswith("avg@")]
    completed = [
        trajectory
        for trajectory in read_trajectories(evaluation.with_suffix(""))
        if trajectory.status is Status.COMPLETED
    ]
    turns = [turn for trajectory in completed for turn in trajectory.turns]
    count = max(1, len(completed))
    return TeamCost(
        accuracy=accuracies[-1],
        sampled=sum(len(turn.completion_ids) for turn in turns) / count,
        read=sum(len(turn.prompt_ids) for turn in turns) / count,
    )
