"""Sections of a run, and properties that depend on several of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import to_json

from mcore_mas.config.cluster import ClusterConfig
from mcore_mas.config.cold_start import ColdStartConfig
from mcore_mas.config.credit import CreditedAgentConfig, LossConfig
from mcore_mas.config.estimators import AdvantageConfig, FilterConfig
from mcore_mas.config.evaluation import EvaluationConfig
from mcore_mas.config.opponents import OpponentConfig
from mcore_mas.config.policy import PolicyConfig, TeacherConfig, policies_on_base
from mcore_mas.config.tracking import TrackingConfig
from mcore_mas.config.trainer import TrainerConfig
from mcore_mas.equations.advantages import REPLAY_ESTIMATORS
from mcore_mas.equations.agreement import Precision
from rollout.base.error_lines import error_line
from rollout.base.section import Section
from rollout.config.collection import CollectionConfig
from rollout.config.data import DataConfig
from rollout.config.environment import EnvConfig
from rollout.config.orchestra import OrchestraConfig
from rollout.config.retriever import RetrieverConfig
from rollout.config.reward import RewardConfig
from rollout.engines import EngineConfig
from rollout.engines.remote.config import RemoteConfig
from rollout.orchestras import TREE_ORCHESTRAS
from rollout.rewards.coach_config import CoachConfig
from rollout.teams.replays import ReplayPlan

# Folders, metrics and tags are named after runs, policies and agents.
MAX_NAME_CHARS = 100
FolderName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=MAX_NAME_CHARS)
]


class RunSections(Section):
    """Sections of a run, each of which is valid; `RunConfig` also checks that they go together."""

    # Name of the run, and of its folder in `results`.
    run: FolderName
    # Folder of the results of all runs.
    results: Path = Path("results")
    seed: int = 1
    data: DataConfig
    env: EnvConfig
    orchestra: OrchestraConfig
    agents: dict[FolderName, CreditedAgentConfig] = Field(min_length=1)
    policies: dict[FolderName, PolicyConfig] = Field(min_length=1)
    # Opponents, each under the name of the frozen policy that plays it.
    # None: every agent is always played by its own policy.
    opponents: dict[FolderName, OpponentConfig] | None = None
    reward: RewardConfig
    advantage: AdvantageConfig
    filter: FilterConfig | None = None
    loss: LossConfig
    engine: EngineConfig
    collection: CollectionConfig = CollectionConfig()
    trainer: TrainerConfig
    evaluation: EvaluationConfig
    # None: the models of the policies exist already.
    cold_start: ColdStartConfig | None = None
    retriever: RetrieverConfig | None = None
    # None: no model scores turns.
    coach: CoachConfig | None = None
    tracking: TrackingConfig
    cluster: ClusterConfig

    @property
    def folder(self) -> Path:
        """Folder of the run's results."""
        return self.results / self.run

    @property
    def models(self) -> dict[str, str]:
        """Folder of the model, or its id on the Hub, of each policy that is not a remote model."""
        return {
            name: policy.model for name, policy in self.policies.items() if policy.remote is None
        }

    @property
    def remotes(self) -> dict[str, RemoteConfig]:
        """Settings of each policy that is a remote model, by policy."""
        return {
            name: policy.remote
            for name, policy in self.policies.items()
            if policy.remote is not None
        }

    @property
    def trained(self) -> tuple[str, ...]:
        """Policies that an agent with a loss weight plays; the others are frozen."""
        trained = {agent.policy for agent in self.agents.values() if agent.loss_weight}
        return tuple(name for name in self.policies if name in trained)

    @property
    def played(self) -> tuple[str, ...]:
        """Policies that an agent or an opponent plays; the others are teachers."""
        played = {agent.policy for agent in self.agents.values()}
        played.update(self.opponents or ())
        return tuple(name for name in self.policies if name in played)

    @property
    def teachers(self) -> dict[str, TeacherConfig]:
        """Teacher of each policy that has one."""
        return {
            name: policy.teacher
            for name, policy in self.policies.items()
            if policy.teacher is not None
        }

    @property
    def keep_best(self) -> int:
        """Number of checkpoints that are kept for their validation accuracy."""
        if self.trainer.keep_best is not None:
            return self.trainer.keep_best
        return 1 if self.data.validation else 0

    @property
    def vote_sources(self) -> frozenset[str]:
        """Mechanisms by which this run can compare different trajectories or branches; see `Grouping.vote_sources`."""
        branching = self.trainer.branching
        sources = set()
        if self.trainer.group_size > 1:
            sources.add("groups")
            if self.env.names_states:
                sources.add("states")
        if self.orchestra.name in TREE_ORCHESTRAS or (
            branching is not None and branching.width > 1
        ):
            sources.add("trees")
        return frozenset(sources)

    @property
    def collects_ahead(self) -> bool:
        """True if trajectories of later steps may be collected while a step is trained.

        `may_collect` says which steps these are.
        """
        if not self.trained:
            return False
        may_be_stale = [self.staleness_of(policy) > 0 for policy in self.trained]
        if self.trainer.alternate is None:
            # Every step changes all trained policies, so earlier trajectories are stale for each of them.
            return all(may_be_stale)
        # A step changes one policy. If this policy may be stale, later trajectories can be collected meanwhile.
        return any(may_be_stale)

    def trained_agents(self, policy: str) -> dict[str, float]:
        """Return the loss weight of each agent that trains `policy`."""
        return {
            name: agent.loss_weight
            for name, agent in self.agents.items()
            if agent.policy == policy and agent.loss_weight
        }

    def advantage_of(self, agent: str) -> AdvantageConfig:
        """Return the estimator of an agent."""
        return self.agents[agent].advantage or self.advantage

    @property
    def replayed_agents(self) -> tuple[str, ...]:
        """Trained agents whose turns are compared with alternatives."""
        return tuple(
            name
            for name, agent in self.agents.items()
            if agent.loss_weight and self.advantage_of(name).name in REPLAY_ESTIMATORS
        )

    def replay_plan(self, step: int) -> ReplayPlan | None:
        """Return the plan of the replays of every trajectory in a step; None if the run samples no alternatives.

        Only the turns of agents whose policies the step trains get alternatives.
        """
        replays = self.trainer.replays
        if replays is None:
            return None
        policies = self.in_turn(step)
        agents = [name for name in self.replayed_agents if self.agents[name].policy in policies]
        trajectory_budget = None
        if replays.budget is not None:
            trajectory_budget = replays.budget // self.trainer.trajectories_per_step
        return ReplayPlan(
            agents=agents,
            alternatives=replays.alternatives,
            budget=trajectory_budget,
            removal=replays.removal,
        )

    def precision_of(self, policy: str) -> Precision:
        """Return the lower of the precisions in which trainer and engine compute log-probabilities."""
        config = self.policies[policy]
        engine = for_policy(self, policy).engine
        is_sglang = engine.name == "sglang"
        if config.fp8 is not None or (is_sglang and engine.options.get("quantization") == "fp8"):
            return "float8"
        # SGLang computes in 16 bits unless its options ask for float32; the embedded engine computes like the trainer.
        is_16_bit_engine = is_sglang and engine.options.get("dtype") != "float32"
        return "bfloat16" if is_16_bit_engine or config.bf16 else "float32"

    def holder(self, policy: str) -> str:
        """Return the policy on whose ranks this one is trained: the first of those that share its base model."""
        return policies_on_base(self.policies, policy)[0]

    def in_turn(self, step: int) -> tuple[str, ...]:
        """Return the policies that are trained in a step."""
        alternate = self.trainer.alternate
        if alternate is None:
            return self.trained
        return (alternate.order[step // alternate.steps % len(alternate.order)],)

    def staleness_of(self, policy: str) -> int:
        """Return the largest allowed number of weight syncs between sampling and training the turns of a policy."""
        staleness = self.policies[policy].staleness
        return self.trainer.staleness if staleness is None else staleness

    def may_collect(self, step: int, trained_steps: int) -> bool:
        """Return True if trajectories of `step` may be collected with the weights after `trained_steps` steps."""
        if step > trained_steps and not self.collects_ahead:
            return False
        for policy in self.trained:
            syncs = sum(policy in self.in_turn(earlier) for earlier in range(trained_steps, step))
            if syncs > self.staleness_of(policy):
                return False
        return True

    @property
    def concurrent_steps(self) -> int:
        """Largest number of training steps whose trajectories may be collected at the same time."""
        # `first` is the oldest of the concurrent steps. The order of `alternate` repeats, so it is enough to try one
        # cycle; near the end of the run, the number is only lower.
        steps_per_cycle = 1
        if self.trainer.alternate is not None:
            steps_per_cycle = self.trainer.alternate.steps * len(self.trainer.alternate.order)
        largest = 1
        for first in range(min(steps_per_cycle, self.trainer.steps)):
            last = first
            while last + 1 < self.trainer.steps and self.may_collect(last + 1, first):
                last += 1
            largest = max(largest, last - first + 1)
        return largest

    def trajectories_in_flight(self, servers: int) -> int:
        """Return the largest number of concurrent trajectories of an evaluation or validation.

        Args:
            servers: number of inference servers of all policies together.
        """
        if self.evaluation.in_flight is not None:
            return self.evaluation.in_flight
        # Twice as many trajectories as requests that are decoded at once: while some call tools, others fill the slots.
        remote_slots = sum(remote.concurrency for remote in self.remotes.values())
        return 2 * (self.engine.slots * servers + remote_slots)


_Run = TypeVar("_Run", bound=RunSections)


def for_policy(config: _Run, policy: str) -> _Run:
    """Return the run's config with a policy's overrides merged into the sections engine, loss and trainer.

    Raises:
        ValueError: the settings do not validate, or a micro-batch of a trained policy cannot hold one sequence of its
            engine.
    """
    overrides = config.policies[policy].overrides
    sections: dict[str, Section] = {
        "engine": config.engine,
        "loss": config.loss,
        "trainer": config.trainer,
    }
    for name, section in sections.items():
        if not getattr(overrides, name):
            continue
        values = overrides.merged_into(name, section)
        try:
            json = to_json(values, inf_nan_mode="constants")
            sections[name] = type(section).model_validate_json(json, strict=True)
        except ValidationError as error:
            key = f"policies.{policy}.overrides.{name}"
            line = error_line(error, type(section), values, prefix=key)
            raise ValueError(line) from None

    run_config = config.model_copy(update=sections)
    tokens = run_config.trainer.microbatch_tokens
    length = run_config.engine.max_length
    if tokens < length and policy in config.trained:
        prefix = f"policies.{policy}.overrides: " if overrides.engine or overrides.trainer else ""
        raise ValueError(
            f"{prefix}trainer.microbatch_tokens {tokens} has no room for one sequence of engine.max_length {length}; "
            f"use microbatch_tokens: {length}, or max_length: {tokens}"
        )
    return run_config


def engine_holder(config: RunSections, policy: str) -> str:
    """Return the policy whose engine samples for `policy`.

    An engine that takes several adapters samples for all policies that share a base model, and belongs to the first
    of them, the holder. Otherwise each policy has an engine of its own.
    """
    engine = for_policy(config, policy).engine
    takes_several_adapters = engine.name == "embedded" or engine.adapters == "slots"
    return config.holder(policy) if takes_several_adapters else policy


def schedule_length(config: RunSections, policy: str, *, of_critic: bool = False) -> int:
    """Return the default of `decay_steps` of a policy or its critic: the length of its learning rate schedule.

    The length is the number of updates in the whole run, 0 for a frozen policy. A policy is not updated in the head
    start of its critic. With `trainer.minibatch` the number of updates is not known beforehand, and the schedule
    advances once per step that trains the policy, also in the head start (see `schedule_positions`); the length is then
    the number of these steps.
    """
    trainer = for_policy(config, policy).trainer
    critic = config.policies[policy].critic
    first_step = 0
    if critic is not None and not of_critic and not trainer.minibatch:
        first_step = critic.head_start
    if trainer.alternate is not None:
        steps = sum(policy in config.in_turn(step) for step in range(first_step, trainer.steps))
    else:
        steps = max(0, trainer.steps - first_step) if policy in config.trained else 0
    if trainer.minibatch:
        return steps
    return trainer.passes * trainer.updates_per_step * steps
