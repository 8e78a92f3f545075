"""Run configuration: every section of a run, and the checks that they go together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import to_json

from mcore_mas.config.cluster import ClusterConfig
from mcore_mas.config.cold_start import ColdStartConfig
from mcore_mas.config.credit import (
    CorrectionConfig,
    CreditedAgentConfig,
    LossConfig,
    check_several_votes,
)
from mcore_mas.config.estimators import AdvantageConfig, FilterConfig
from mcore_mas.config.evaluation import EvaluationConfig
from mcore_mas.config.opponents import OpponentConfig, PastConfig
from mcore_mas.config.policy import (
    PolicyConfig,
    TeacherConfig,
    check_shared_bases,
    policies_on_base,
)
from mcore_mas.config.removed import removed_key_error
from mcore_mas.config.run_paths import relocate_paths
from mcore_mas.config.tracking import TrackingConfig
from mcore_mas.config.trainer import TrainerConfig
from mcore_mas.equations.advantages import (
    REPLAY_ESTIMATORS,
    REQUIRED_COLUMN,
    estimator_grouping,
)
from mcore_mas.equations.agreement import Precision
from mcore_mas.equations.filters import filter_grouping
from rollout.base.error_lines import error_line
from rollout.base.hints import nearest_hint
from rollout.base.lookup import UnknownName, lookup
from rollout.base.redaction import redact_secrets
from rollout.base.section import Section
from rollout.base.yaml_files import read_yaml
from rollout.config.choice import check_agent_names
from rollout.config.collection import CollectionConfig
from rollout.config.data import DataConfig
from rollout.config.environment import EnvConfig
from rollout.config.orchestra import OrchestraConfig
from rollout.config.retriever import RetrieverConfig
from rollout.config.reward import RewardConfig
from rollout.engines import EngineConfig
from rollout.engines.remote.config import RemoteConfig
from rollout.engines.sglang.settings import adapter_error
from rollout.environments.openenv import openenv_sessions
from rollout.orchestras import TREE_ORCHESTRAS
from rollout.rewards.coach_config import CoachConfig
from rollout.tasks.generators import GENERATORS
from rollout.teams.replays import ReplayPlan
from rollout.teams.roles import ROLES

STATES = ("base", "trained")  # states of a run's policies: before training and after it
GAIN = "trained-base"  # the difference of the two, paired by task


class ConfigError(ValueError):
    """A config that cannot be used: one line that says what, where, expected and what to do, without secrets."""

    def __init__(self, line: str) -> None:
        super().__init__(redact_secrets(line))


# Folders, metrics and tags are named after runs, policies and agents.
MAX_NAME_CHARS = 100
FolderName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=MAX_NAME_CHARS)
]


class RunConfig(Section):
    """Everything that determines one run."""

    run: FolderName
    results: Path = Path("results")
    seed: int = 1
    data: DataConfig
    env: EnvConfig
    orchestra: OrchestraConfig
    agents: dict[FolderName, CreditedAgentConfig] = Field(min_length=1)
    policies: dict[FolderName, PolicyConfig] = Field(min_length=1)
    # Opponents by their policy: a model folder, such as the base or an exported checkpoint, or a remote model.
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

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        """Read a resolved config, as the pipeline wrote it.

        A run can be used from any directory, also after its folder was moved or copied (see
        `relocate_paths`).

        Raises:
            ConfigError: the file is missing or not YAML, or its values do not validate.
        """
        if not path.is_file():
            raise ConfigError(
                f"{path}: no such file; expected a resolved config, results/<run>/config.yaml, which `snakemake` "
                "writes before the first job of the run"
            )
        try:
            values = read_yaml(path)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            message = " ".join(str(error).split())
            raise ConfigError(f"{path}: not YAML ({message}); make it again") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path}: {type(values).__name__}, where a config is a mapping; name another file"
            )
        return cls.from_values(relocate_paths(values, path), str(path))

    @classmethod
    def from_values(cls, values: Any, origin: str) -> RunConfig:
        """Return the config of plain values, with the default correction filled in.

        Args:
            values: nested mappings, as YAML or JSON yields them.
            origin: source of the values, such as a file's path, with which error messages begin.

        Raises:
            ConfigError: the values do not validate.
        """
        if isinstance(values, dict):
            removed = removed_key_error(values)
            if removed:
                raise ConfigError(f"{origin}: {removed}")
        try:
            if isinstance(values, dict):
                _check_policy_names(
                    values.get("agents"), values.get("policies"), values.get("opponents")
                )
            # Strict validation of JSON, unlike that of Python values, takes a text for a path and a list for a tuple.
            json = to_json(values, inf_nan_mode="constants")
            return _with_default_correction(cls.model_validate_json(json, strict=True))
        except ValidationError as error:
            raise ConfigError(f"{origin}: {error_line(error, cls, values)}") from None
        except ValueError as error:  # also UnknownName
            raise ConfigError(f"{origin}: {error}") from None

    @model_validator(mode="after")
    def _check_sections(self) -> RunConfig:
        _check_agents(self)
        _check_team(self)
        _check_sessions(self)
        _check_cold_start(self)
        _check_lengths(self)
        _check_replays(self)
        _check_credit(self)
        _check_schedules(self)
        check_shared_bases(self.policies, self.trained)
        _check_engines(self)
        _check_teachers(self)
        _check_collection_ahead(self)
        _check_opponents(self)
        return self

    @property
    def folder(self) -> Path:
        """Folder of the run's results."""
        return self.results / self.run

    @property
    def models(self) -> dict[str, str]:
        """Model folder of each policy that is not a remote model."""
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
        played = {agent.policy for agent in self.agents.values() if agent.loss_weight}
        return tuple(name for name in self.policies if name in played)

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
        """Mechanisms of this run that put several scores (votes) into a peer group; see `Grouping.vote_sources`."""
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
        """True if trajectories of later steps may be collected while a step is trained; see `may_collect`."""
        if not self.trained:
            return False
        may_be_stale = [self.staleness_of(policy) > 0 for policy in self.trained]
        if self.trainer.alternate is None:
            # Each step syncs all trained policies, so the next trajectories are stale for all of them.
            return all(may_be_stale)
        # Each step syncs one policy; collection is ahead in the steps of those that may be stale.
        return any(may_be_stale)

    def trained_agents(self, policy: str) -> dict[str, float]:
        """Return the loss weights of the agents that train a policy."""
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

    def replays_of(self, step: int) -> ReplayPlan | None:
        """Return the replays of each trajectory in a step, for agents whose policies the step trains."""
        replays = self.trainer.replays
        if replays is None:
            return None
        policies = self.in_turn(step)
        agents = [name for name in self.replayed_agents if self.agents[name].policy in policies]
        budget = None
        if replays.budget is not None:
            budget = replays.budget // self.trainer.trajectories_per_step
        return ReplayPlan(
            agents=agents,
            alternatives=replays.alternatives,
            budget=budget,
            removal=replays.removal,
        )

    def precision_of(self, policy: str) -> Precision:
        """Return the lower of the precisions in which trainer and engine compute log-probabilities."""
        config = self.policies[policy]
        engine = for_policy(self, policy).engine
        is_sglang = engine.name == "sglang"
        if config.fp8 is not None or (is_sglang and engine.options.get("quantization") == "fp8"):
            return "float8"
        is_engine_bf16 = is_sglang and engine.options.get("dtype") != "float32"
        return "bfloat16" if is_engine_bf16 or config.bf16 else "float32"

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

    def may_collect(self, step: int, trained: int) -> bool:
        """Return True if trajectories of `step` may be collected with the weights after `trained` steps."""
        if step > trained and not self.collects_ahead:
            return False
        for policy in self.trained:
            syncs = sum(policy in self.in_turn(between) for between in range(trained, step))
            if syncs > self.staleness_of(policy):
                return False
        return True

    def trajectories_in_flight(self, servers: int) -> int:
        """Return the largest number of concurrent trajectories of an evaluation or validation.

        Args:
            servers: number of engines and of their replicas.
        """
        if self.evaluation.in_flight is not None:
            return self.evaluation.in_flight
        remote_slots = sum(remote.concurrency for remote in self.remotes.values())
        return 2 * (self.engine.slots * servers + remote_slots)


def for_policy(config: RunConfig, policy: str) -> RunConfig:
    """Return the run with a policy's overrides of engine, loss and trainer.

    Raises:
        ValueError: the settings do not validate, or a micro-batch cannot hold one sequence of the engine.
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
            prefix = f"policies.{policy}.overrides.{name}"
            line = error_line(error, type(section), values, prefix=prefix)
            raise ValueError(line) from None

    policy_config = config.model_copy(update=sections)
    tokens = policy_config.trainer.microbatch_tokens
    length = policy_config.engine.max_length
    if tokens < length:
        key = f"policies.{policy}.overrides: " if overrides.engine or overrides.trainer else ""
        raise ValueError(
            f"{key}trainer.microbatch_tokens {tokens} has no room for one sequence of engine.max_length {length}; "
            f"use microbatch_tokens: {length}, or max_length: {tokens}"
        )
    return policy_config


def engine_holder(config: RunConfig, policy: str) -> str:
    """Return the policy whose engine samples for `policy`: its holder if one engine holds all adapters, else itself."""
    engine = for_policy(config, policy).engine
    holds_adapters = engine.name == "embedded" or engine.adapters == "slots"
    return config.holder(policy) if holds_adapters else policy


def schedule_length(config: RunConfig, policy: str) -> int:
    """Return the length of a policy's learning rate schedule, in updates.

    It is the number of the policy's updates in the whole run. With `trainer.minibatch`, this number is not known
    beforehand, so the length is in training steps.
    """
    trainer = for_policy(config, policy).trainer
    steps = trainer.steps if policy in config.trained else 0
    if config.trainer.alternate is not None:
        steps = sum(policy in config.in_turn(step) for step in range(trainer.steps))
    if trainer.minibatch:
        return steps
    return trainer.passes * trainer.updates_per_step * steps


def _with_default_correction(config: RunConfig) -> RunConfig:
    """Choose the correction `tis` if none is named and a trained policy's log-probabilities are not in float32."""
    all_float32 = all(config.precision_of(policy) == "float32" for policy in config.trained)
    if "correction" in config.loss.model_fields_set or all_float32:
        return config
    loss = config.loss.model_copy(update={"correction": CorrectionConfig(name="tis")})
    return config.model_copy(update={"loss": loss})


def _check_policy_names(agents: Any, policies: Any, opponents: Any) -> None:
    """Refuse agents and policies that do not belong together.

    This comes before the validation of the sections: the section of a misspelt policy would lack all of its keys.
    """
    if not isinstance(agents, dict) or not isinstance(policies, dict):
        return
    if not all(isinstance(agent, Mapping) for agent in agents.values()):
        return
    policy_of_agent = {
        name: agent["policy"]
        for name, agent in agents.items()
        if isinstance(agent.get("policy"), str)
    }
    for name, policy in policy_of_agent.items():
        if policy not in policies:
            nearest_policies = nearest_hint(policy, policies)
            playable = [agent for agent in policy_of_agent if policy_of_agent[agent] in policies]
            nearest_agents = nearest_hint(name, playable).replace("nearest", "nearest agents")
            raise ValueError(
                f"agent '{name}' plays policy '{policy}', which is not defined; policies: {', '.join(policies)}"
                f"{nearest_policies or nearest_agents}; set agents.{name}.policy to one of them, "
                f"define policies.{policy}, or "
                "take an experiment of this team (`mcore-mas list experiments`)"
            )
    opponent_names = set(opponents) if isinstance(opponents, Mapping) else set()
    unplayed = sorted(
        policies.keys() - set(policy_of_agent.values()) - opponent_names - _teacher_names(policies)
    )
    if unplayed and len(policy_of_agent) == len(agents):
        nearest_policies = nearest_hint(unplayed[0], policies.keys() - unplayed)
        raise ValueError(
            f"policy '{unplayed[0]}' is played by no agent; remove it or name it in agents{nearest_policies}"
        )


def _teacher_names(policies: Mapping[str, Any]) -> set[str]:
    """Return the names of the teachers in plain values of a config."""
    names = set()
    for policy in policies.values():
        teacher = policy.get("teacher") if isinstance(policy, Mapping) else None
        name = teacher.get("policy") if isinstance(teacher, Mapping) else None
        if isinstance(name, str):
            names.add(name)
    return names


def _check_agents(config: RunConfig) -> None:
    """Check the role of each agent, and that it can train its policy."""
    for name, agent in config.agents.items():
        try:
            lookup("agent role", agent.role or name, ROLES)
        except UnknownName as error:
            raise ValueError(
                f"agents.{name}: {error}; or no module that is imported registers it"
            ) from None
        if not agent.loss_weight:
            continue
        policy = config.policies[agent.policy]
        if policy.remote is not None:
            raise ValueError(
                f"agent '{name}' plays policy '{agent.policy}', a remote model, which cannot be trained; "
                f"set agents.{name}.loss_weight=0"
            )
        if not agent.temperature:
            raise ValueError(
                f"agent '{name}' is trained and samples at temperature 0, where log-probabilities have no gradient; "
                f"set agents.{name}.temperature above 0, or loss_weight to 0"
            )
        if not policy.lr:
            raise ValueError(
                f"policies.{agent.policy}.lr is missing; agent '{name}' trains this policy"
            )


def _check_team(config: RunConfig) -> None:
    """Check that orchestra, environment, reward, coach and retriever go with the agents."""
    config.orchestra.check_agents(config.agents)
    config.env.check_tools(config.agents)
    if config.orchestra.name in TREE_ORCHESTRAS and config.trainer.branching is not None:
        raise ValueError(
            f"orchestra '{config.orchestra.name}' grows its own tree; leave trainer.branching out"
        )
    config.reward.check_agents(config.agents)
    if config.reward.name == "coach" and config.coach is None:
        raise ValueError("reward 'coach' needs a coach; choose one, for example coach=openai")
    if config.coach is not None:
        named = config.coach.model_dump(include={"agents", "judged_with_answer", "metrics_for"})
        check_agent_names("coach", named, config.agents)
    if "retriever" in config.env.needs and config.retriever is None:
        raise ValueError(
            f"env '{config.env.name}' needs a retriever; add retriever: {{}}, or name the urls of servers in it"
        )


def _check_sessions(config: RunConfig) -> None:
    """Check that OpenEnv's servers have enough sessions for the trees that grow at a time.

    A branch needs a session, and a tree keeps its sessions until all of its branches have one. If every tree
    lacks one session for its last branch, a single further session lets the trees finish, one after the other.
    """
    branching = config.trainer.branching
    if config.env.name != "openenv" or branching is None:
        return
    steps = 1
    if config.collects_ahead:
        steps += max(map(config.staleness_of, config.trained))
    trees = steps * config.trainer.trajectories_per_step
    needed = trees * (branching.width - 1) + 1
    sessions = openenv_sessions(**config.env.options)
    if sessions < needed:
        raise ValueError(
            f"trainer.branching.width {branching.width} needs {needed} sessions of OpenEnv, and env.options allow "
            f"{sessions}: with fewer, the {trees} trees that grow at a time may take all and wait for each other; "
            "raise env.options.sessions (or servers), or lower width or tasks_per_step"
        )


def _check_cold_start(config: RunConfig) -> None:
    if config.cold_start is None:
        return
    options = config.cold_start.options
    config.data.demonstration_arguments(options)
    if config.data.generator in GENERATORS:  # their options name agents, if they name anything
        check_agent_names("cold_start.options", options, config.agents)
    for name, policy in config.policies.items():
        if policy.chat_template or policy.chat_template_kwargs:
            raise ValueError(
                f"policies.{name}: a cold start makes the model with a chat template of its own that takes no "
                "arguments; leave chat_template and chat_template_kwargs out"
            )


def _check_lengths(config: RunConfig) -> None:
    """Check that replies fit the sequences of the engines, and the buffer of `overlong` fits the replies."""
    overlong = config.reward.penalties.get("overlong", {})
    buffer = overlong.get("buffer", 0)
    for name, agent in config.agents.items():
        limit = overlong.get("max_tokens", {}).get(name, agent.max_tokens)
        if buffer > limit:
            raise ValueError(
                f"reward.penalties.overlong.buffer {buffer} is more than max_tokens {limit} of agent '{name}'; "
                "lower it"
            )
        length = for_policy(config, agent.policy).engine.max_length
        if agent.max_tokens >= length and config.policies[agent.policy].remote is None:
            raise ValueError(
                f"agents.{name}.max_tokens {agent.max_tokens} leaves no room for a prompt in engine.max_length "
                f"{length}; lower it, or raise max_length"
            )


def _check_replays(config: RunConfig) -> None:
    """Check that the advantage c3 has alternatives, and that the run can replay its trajectories."""
    agents = config.replayed_agents
    replays = config.trainer.replays
    if replays is None and agents:
        raise ValueError(
            f"agent '{agents[0]}': advantage '{config.advantage_of(agents[0]).name}' compares a reply with "
            "alternatives, and this run samples none; set trainer.replays.alternatives"
        )
    if replays is None:
        return
    if not agents:
        raise ValueError(
            "trainer.replays samples alternatives for the advantage 'c3', which no trained agent has; "
            "leave trainer.replays out, or choose advantage=c3"
        )
    trajectories = config.trainer.trajectories_per_step
    if replays.budget is not None and replays.budget < trajectories:
        raise ValueError(
            f"trainer.replays.budget {replays.budget} is less than one alternative for each of the "
            f"{trajectories} trajectories of a step; raise it, or leave it out"
        )
    problems = {
        "trainer.branching, because a trajectory is replayed or sampled as a tree": (
            config.trainer.branching is not None
        ),
        f"orchestra '{config.orchestra.name}', which grows its own tree": (
            config.orchestra.name in TREE_ORCHESTRAS
        ),
        f"reward '{config.reward.name}'; expected 'shared_outcome', because an alternative is paid the "
        "outcome of its replay": config.reward.name != "shared_outcome",
        "a filter, which compares trajectories": config.filter is not None,
    }
    for problem, is_given in problems.items():
        if is_given:
            raise ValueError(f"trainer.replays cannot be used with {problem}")


def _check_credit(config: RunConfig) -> None:
    """Check what the advantage estimators and the filter need, and that `alpha` is not applied twice."""
    for agent in config.agents:
        _check_advantage(config, agent)
    if config.filter is not None:
        grouping = filter_grouping(config.filter.name, config.filter.options)
        check_several_votes(f"filter '{config.filter.name}'", grouping, config.vote_sources)

    if config.reward.name == "local_team" and config.trainer.branching is not None:
        team_weight = config.reward.options.get("alpha", 1.0)
        branch_weight = config.trainer.branching.alpha
        if team_weight != 1.0 and branch_weight != 1.0:
            raise ValueError(
                f"reward.options.alpha {team_weight:g} would multiply trainer.branching.alpha {branch_weight:g}, "
                "which is in a branch's score already; leave one of them out"
            )


def _check_advantage(config: RunConfig, name: str) -> None:
    """Check that a run has the inputs of an agent's advantage estimator, and turns to compare with each other."""
    agent = config.agents[name]
    advantage = config.advantage_of(name)
    label = f"agent '{name}': advantage '{advantage.name}'"
    required = REQUIRED_COLUMN.get(advantage.name)
    is_trained = agent.policy in config.trained
    if required == "values" and is_trained and config.policies[agent.policy].critic is None:
        raise ValueError(f"{label} needs policies.{agent.policy}.critic")
    if required == "greedy_rewards" and config.reward.name == "tree_shaping":
        raise ValueError(
            f"{label} plays a greedy trajectory, which reward 'tree_shaping' has no reward for"
        )
    if required == "step_rewards" and "trees" in config.vote_sources:
        raise ValueError(
            f"{label} needs the rewards of consecutive steps, which trees do not have; choose another"
        )

    teacher = config.teachers.get(agent.policy)
    learns_from_reward = agent.loss_weight and not (teacher and teacher.alone)
    # With `lone: raw`, a vote without peers has an advantage too.
    if learns_from_reward and advantage.options.get("lone") != "raw":
        grouping = estimator_grouping(advantage.name, advantage.options)
        check_several_votes(label, grouping, config.vote_sources)


def _check_schedules(config: RunConfig) -> None:
    """Check that each trained policy has its turn, and that no schedule ends before its warm-up does."""
    alternate = config.trainer.alternate
    trained = config.trained
    if alternate is not None and sorted(alternate.order) != sorted(trained):
        raise ValueError(
            f"trainer.alternate.order is {', '.join(alternate.order)}; expected every trained policy once: "
            f"{', '.join(trained)}"
        )
    for name in trained:
        policy = config.policies[name]
        for key, optimizer in ((name, policy), (f"{name}.critic", policy.critic)):
            if optimizer is None or optimizer.schedule == "constant":
                continue
            last = optimizer.decay_steps or schedule_length(config, name)
            if last <= optimizer.warmup_steps:
                raise ValueError(
                    f"policies.{key}: schedule '{optimizer.schedule}' ends with update {last}, but warmup_steps is "
                    f"{optimizer.warmup_steps}; lower it, or raise decay_steps"
                )


def _check_engines(config: RunConfig) -> None:
    """Check that the engines go with the cluster and the policies."""
    groups = {name: policies_on_base(config.policies, name) for name in config.policies}
    resident = [name for name in config.trained if not config.policies[name].offload]
    config.cluster.check_policies(groups, resident)

    threads = config.cluster.threads_per_process or 1
    may_use_cpu = config.engine.name == "embedded" and config.engine.device != "cuda"
    if threads > 1 and config.engine.deterministic and may_use_cpu:
        raise ValueError(
            f"cluster.threads_per_process: {threads}, but on a CPU engine.deterministic needs 1 thread for equal "
            "bits; set threads_per_process to 1, or leave it out"
        )
    if config.engine.router_replay and not config.models:
        raise ValueError(
            "engine.router_replay: remote models do not report their experts; leave it out"
        )
    for name in config.models:
        policy = config.policies[name]
        engine = for_policy(config, name).engine
        config.cluster.check_engine(name, engine)
        if policy.share_base:
            holder = config.holder(name)
            holder_engine = for_policy(config, holder).engine
            config.cluster.check_shared_engine(name, engine, holder, holder_engine)
        if engine.adapters == "slots" and name in config.trained:
            problem = "engine.adapters: slots is for policies with lora"
            if policy.lora is not None:
                problem = adapter_error(policy.lora.targets)
            if problem:
                raise ValueError(f"policies.{name}: {problem}")


def _check_teachers(config: RunConfig) -> None:
    """Check that each teacher exists, and can score the tokens of its student."""
    for name, teacher in config.teachers.items():
        key = f"policies.{name}.teacher"
        if name not in config.trained:
            raise ValueError(f"{key}: nothing trains this policy; leave it out")
        others = [other for other in config.policies if other != name]
        if teacher.policy == name and teacher.context is not None:
            others.append(name)  # it knows more with the context than without
        if teacher.policy not in others:
            raise ValueError(
                f"{key}.policy is '{teacher.policy}'; expected another policy of the run"
                f"{': ' + ', '.join(others) if others else ''}; define policies.{teacher.policy} with "
                "its model or remote"
            )
        _check_teacher_engine(config, name, teacher.policy)
        if for_policy(config, name).engine.grammar:
            raise ValueError(
                f"{key}: engine.grammar changes the probabilities of the policy, and its teacher has no grammar; "
                "set engine.grammar to false, or leave the teacher out"
            )


def _check_teacher_engine(config: RunConfig, student: str, teacher: str) -> None:
    """Refuse a teacher that cannot score at the temperatures or the length of its student."""
    key = f"policies.{student}.teacher"
    remote = config.policies[teacher].remote
    engine = for_policy(config, teacher).engine
    length = for_policy(config, student).engine.max_length
    if remote is not None:
        if remote.provider != "openai" or remote.url is None:
            raise ValueError(
                f"{key}: policies.{teacher}.remote has provider '{remote.provider}' and url {remote.url}; expected "
                "provider openai and the url of a server whose completions API gives log-probabilities of a prompt, "
                "such as vLLM or SGLang"
            )
        if remote.budget.model_fields_set:
            raise ValueError(
                f"{key}: policies.{teacher}.remote.budget: scores are not counted; leave it out"
            )
    elif engine.max_length < length:
        raise ValueError(
            f"{key}: the engine of '{teacher}' takes {engine.max_length} tokens, and that of '{student}' {length}; "
            f"set policies.{teacher}.overrides.engine.max_length: {length}"
        )
    if remote is None and engine.name == "embedded":
        return
    for name in config.trained_agents(student):
        temperature = config.agents[name].temperature
        if temperature != 1:
            raise ValueError(
                f"{key}: servers score at temperature 1, and agent '{name}' samples at {temperature:g}; set "
                f"agents.{name}.temperature: 1, or give '{teacher}' the engine embedded"
            )


def _check_collection_ahead(config: RunConfig) -> None:
    """Refuse a staleness of frozen policies, and freeing memory while trajectories of later steps are collected."""
    for name, policy in config.policies.items():
        if policy.staleness is not None and name not in config.trained:
            raise ValueError(f"policies.{name}.staleness: nothing trains this policy; leave it out")
    if not config.collects_ahead:
        return
    staleness = max(config.staleness_of(name) for name in config.trained)
    if config.engine.sleep:
        raise ValueError(
            f"engine.sleep: with a staleness of {staleness} engines sample while policies are trained, and cannot "
            "sleep; set engine.sleep to false, or staleness to 0"
        )
    for name, policy in config.policies.items():
        if policy.offload:
            raise ValueError(
                f"policy '{name}': offload frees the trainer's memory while the team acts, and with a "
                f"staleness of {staleness} the team acts while it trains; choose one of them"
            )


def _check_opponents(config: RunConfig) -> None:
    """Check that opponents are frozen policies, that their shares fit, and that they can play."""
    if not config.opponents:
        return
    if config.orchestra.name != "duel":
        raise ValueError(
            f"opponents play an agent of the team 'duel', and this is '{config.orchestra.name}'; leave them out"
        )
    total = sum(opponent.share for opponent in config.opponents.values())
    if total > 1 + 1e-9:
        raise ValueError(
            f"the shares of opponents add up to {total:g}; expected at most 1, and the rest is self-play"
        )
    for policy, opponent in config.opponents.items():
        _check_opponent(config, policy, opponent)


def _check_opponent(config: RunConfig, policy: str, opponent: OpponentConfig) -> None:
    if policy not in config.policies:
        raise ValueError(
            f"opponents names '{policy}', which is not defined; policies: {', '.join(config.policies)}; "
            f"define policies.{policy}"
        )
    if policy in config.trained:
        raise ValueError(
            f"opponents names '{policy}', which is trained; define another policy for the opponent"
        )
    trained_agents = [name for name, agent in config.agents.items() if agent.loss_weight]
    for name in opponent.agents:
        if name not in trained_agents:
            raise ValueError(
                f"opponents.{policy}.agents names '{name}'; expected trained agents: {', '.join(trained_agents)}"
            )
    if opponent.past is not None:
        _check_past(config, policy, opponent.past)


def _check_past(config: RunConfig, policy: str, past: PastConfig) -> None:
    """Check that an opponent's engine can be given the earlier weights of a trained policy."""
    if past.of not in config.trained:
        raise ValueError(
            f"opponents.{policy}.past.of is '{past.of}'; expected a trained policy: {', '.join(config.trained)}"
        )
    if config.policies[policy].model != config.policies[past.of].model:
        raise ValueError(
            f"policies.{policy} plays with earlier weights of '{past.of}', and starts from another model; "
            f"set policies.{policy}.model to {config.policies[past.of].model}"
        )
    if config.policies[past.of].lora is not None:
        raise ValueError(
            f"opponents.{policy}.past keeps whole weights, and '{past.of}' trains adapters; leave past or lora out"
        )
    if config.collects_ahead or config.engine.sleep:
        raise ValueError(
            f"opponents.{policy}.past gives the opponent's engine new weights before each step; "
            "use trainer.staleness: 0 and engine.sleep: false"
        )
    transport = for_policy(config, policy).engine.transport
    if transport in ("tensor", "distributed"):
        raise ValueError(
            f"opponents.{policy}.past: its weights come from files, and transport '{transport}' sends those of a "
            f"trainer's GPUs; set policies.{policy}.overrides.engine.transport to disk"
        )
