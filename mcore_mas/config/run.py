"""Run configuration: every section of a run, checked once by pydantic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import to_json

from mcore_mas.config.cluster import ClusterConfig
from mcore_mas.config.credit import (
    AdvantageConfig,
    CorrectionConfig,
    CreditedAgentConfig,
    FilterConfig,
    LossConfig,
    check_contrast,
)
from mcore_mas.config.policy import (
    ColdStartConfig,
    EvaluationConfig,
    PolicyConfig,
    TrackingConfig,
    TrainerConfig,
    check_sharing,
    sharing,
)
from mcore_mas.config.removed import removed_key_error
from mcore_mas.equations.advantages import REQUIRED_COLUMN, estimator_grouping
from mcore_mas.equations.divergence import Precision
from mcore_mas.equations.filters import filter_grouping
from rollout.base.error_lines import error_line
from rollout.base.files import read_yaml
from rollout.base.lookup import UnknownName, lookup
from rollout.base.section import Section
from rollout.base.text import nearest, without_secrets
from rollout.config.data import DataConfig
from rollout.config.sections import (
    CollectionConfig,
    EnvConfig,
    OrchestraConfig,
    RetrieverConfig,
    RewardConfig,
    check_named,
)
from rollout.engines import EngineConfig
from rollout.engines.remote import RemoteConfig
from rollout.engines.sglang.settings import slot_problem
from rollout.orchestras import SEARCHES
from rollout.rewards.coach import CoachConfig
from rollout.tasks import GENERATORS
from rollout.teams.roles import ROLES


class ConfigError(ValueError):
    """A config cannot be used: one line that says what, where, expected, what to do; keys in it are not shown."""

    def __init__(self, line: str) -> None:
        super().__init__(without_secrets(line))


STATES = ("base", "trained")  # of a run's policies: before training and after it
GAIN = "trained-base"  # their difference, paired by task


class RunConfig(Section):
    """Everything that determines one run."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")  # also the run folder's name
    results: Path = Path("results")
    seed: int = 1
    data: DataConfig
    env: EnvConfig
    orchestra: OrchestraConfig
    agents: dict[str, CreditedAgentConfig] = Field(min_length=1)
    policies: dict[str, PolicyConfig] = Field(min_length=1)
    reward: RewardConfig
    advantage: AdvantageConfig
    filter: FilterConfig | None = None
    loss: LossConfig
    engine: EngineConfig
    collection: CollectionConfig = CollectionConfig()
    trainer: TrainerConfig
    evaluation: EvaluationConfig
    cold_start: ColdStartConfig | None = None  # None: the policies' models are there already
    retriever: RetrieverConfig | None = None
    coach: CoachConfig | None = None  # None: nobody scores turns
    tracking: TrackingConfig
    cluster: ClusterConfig

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        for name, agent in self.agents.items():
            try:
                lookup("agent role", agent.role or name, ROLES)
            except UnknownName as error:
                raise ValueError(
                    f"agents.{name}: {error}; or no module that is imported registers it"
                ) from None
            self._check_policy(name, agent)
        self.orchestra.check_agents(self.agents)
        self.env.check_tools(self.agents)
        if self.orchestra.name in SEARCHES and self.trainer.branching is not None:
            raise ValueError(
                f"orchestra '{self.orchestra.name}' grows its own tree; leave trainer.branching out"
            )
        self.reward.check_agents(self.agents)
        if self.reward.name == "coach" and self.coach is None:
            raise ValueError("reward 'coach' needs a coach; choose one, for example coach=openai")
        if self.coach is not None:
            named = self.coach.model_dump(include={"agents", "answers_for", "metrics_for"})
            check_named("coach", named, self.agents)
        if "retriever" in self.env.needs and self.retriever is None:
            raise ValueError(
                f"env '{self.env.name}' needs a retriever; add retriever: {{}}, or name the urls of servers in it"
            )
        if self.cold_start is not None:
            self.data.demonstration_arguments(self.cold_start.options)
            if (
                self.data.generator in GENERATORS
            ):  # whose demonstrations' options are by agent, as far as by anything
                check_named("cold_start.options", self.cold_start.options, self.agents)
            for name, policy in self.policies.items():
                if policy.chat_template or policy.chat_template_kwargs:
                    raise ValueError(
                        f"policies.{name}: a cold start makes the model with a chat template of its own that takes no "
                        "arguments; leave chat_template and chat_template_kwargs out"
                    )
        _check_room(self)
        _check_credit(self)
        _check_schedules(self)
        check_sharing(self.policies, self.trained)
        keeping = [name for name in self.trained if not self.policies[name].offload]
        self.cluster.check_policies(
            {name: sharing(self.policies, name) for name in self.policies}, keeping
        )
        _check_engines(self)
        _check_ahead(self)
        return self

    @property
    def contrasts(self) -> frozenset[str]:
        """What makes turns of a task differ: several trajectories ("groups"; with "states" that are named), "trees"."""
        branching = self.trainer.branching
        trees = self.orchestra.name in SEARCHES or (branching is not None and branching.width > 1)
        groups = self.trainer.group_size > 1
        there = {"groups": groups, "trees": trees, "states": groups and self.env.names_states}
        return frozenset(name for name, so in there.items() if so)

    def _check_policy(self, name: str, agent: CreditedAgentConfig) -> None:
        policy = self.policies[agent.policy]
        if agent.loss_weight and policy.remote is not None:
            raise ValueError(
                f"agent '{name}' plays policy '{agent.policy}', a remote model, which cannot be trained; "
                f"set agents.{name}.loss_weight=0"
            )
        if agent.loss_weight and not agent.temperature:
            raise ValueError(
                f"agent '{name}' is trained and samples at temperature 0, where log-probabilities have no gradient; "
                f"set agents.{name}.temperature above 0, or loss_weight to 0"
            )
        if agent.loss_weight and not policy.lr:
            raise ValueError(
                f"policies.{agent.policy}.lr is missing; agent '{name}' trains this policy"
            )

    def precision_of(self, policy: str) -> Precision:
        """What a policy's log-probabilities are computed in, by trainer or engine, whichever rounds more."""
        engine = for_policy(self, policy).engine
        half = engine.name == "sglang" and engine.options.get("dtype") != "float32"
        return "bfloat16" if half or self.policies[policy].bf16 else "float32"

    def advantage_of(self, agent: str) -> AdvantageConfig:
        """The estimator of an agent: its own, or the run's."""
        return self.agents[agent].advantage or self.advantage

    @property
    def trained(self) -> tuple[str, ...]:
        """The policies that an agent with a loss weight plays; the others are frozen."""
        played = {agent.policy for agent in self.agents.values() if agent.loss_weight}
        return tuple(name for name in self.policies if name in played)

    def holder(self, policy: str) -> str:
        """The policy on whose ranks a trained one is: the first of those that hold their frozen model together."""
        return sharing(self.policies, policy)[0]

    def in_turn(self, step: int) -> tuple[str, ...]:
        """The policies that are trained in `step`."""
        alternate = self.trainer.alternate
        if alternate is None:
            return self.trained
        return (alternate.order[step // alternate.steps % len(alternate.order)],)

    def staleness_of(self, policy: str) -> int:
        """How many hand-overs of its own weights the turns of a policy may be behind when they train."""
        own = self.policies[policy].staleness
        return self.trainer.staleness if own is None else own

    @property
    def ahead(self) -> bool:
        """Whether anything is collected while a step is trained."""
        order = self.trainer.alternate.order if self.trainer.alternate else ()
        turns: list[tuple[str, ...]] = [(name,) for name in order] or [self.trained]
        return bool(self.trained) and any(all(map(self.staleness_of, turn)) for turn in turns)

    def may_collect(self, step: int, trained: int) -> bool:
        """Whether the experience of `step` may be collected by the weights that `trained` steps have left."""
        if step > trained and not self.ahead:
            return False
        until = [self.in_turn(s) for s in range(trained, step)]
        return all(
            sum(name in own for own in until) <= self.staleness_of(name) for name in self.trained
        )

    @property
    def remotes(self) -> dict[str, RemoteConfig]:
        """The models behind an API, by policy."""
        return {
            name: policy.remote
            for name, policy in self.policies.items()
            if policy.remote is not None
        }

    @property
    def models(self) -> dict[str, str]:
        """The folders of the other policies' models."""
        return {
            name: policy.model for name, policy in self.policies.items() if policy.remote is None
        }

    def trajectories_in_flight(self, servers: int) -> int:
        """How many trajectories a measurement plays at a time, on so many engines of its own."""
        slots = self.engine.slots * servers + sum(
            remote.concurrency for remote in self.remotes.values()
        )
        return self.evaluation.in_flight or 2 * slots

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.results / self.run

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        """Read a resolved config, as the pipeline wrote it.

        Raises:
            ConfigError: the file is missing, no YAML, or does not validate.
        """
        if not path.is_file():
            raise ConfigError(
                f"{path}: no such file; expected a resolved config, results/<run>/config.yaml, which `snakemake` "
                "writes before the first job of the run"
            )
        try:
            values = read_yaml(path)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}: not YAML ({' '.join(str(error).split())}); make it again"
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path}: {type(values).__name__}, where a config is a mapping; name another file"
            )
        return cls.check(values, str(path))

    @classmethod
    def check(cls, values: Any, where: str) -> RunConfig:
        """Validate plain values; `where` names their origin in errors.

        Raises:
            ConfigError: they do not validate.
        """
        if isinstance(values, dict):
            removed = removed_key_error(values)
            if removed:
                raise ConfigError(f"{where}: {removed}")
        try:
            if isinstance(values, dict):
                _check_played(values.get("agents"), values.get("policies"))
            return _corrected(
                cls.model_validate_json(to_json(values, inf_nan_mode="constants"), strict=True)
            )
        except ValidationError as error:
            raise ConfigError(f"{where}: {error_line(error, cls, values)}") from None
        except ValueError as error:  # also UnknownName
            raise ConfigError(f"{where}: {error}") from None


def _check_played(agents: Any, policies: Any) -> None:
    """Refuse policies and agents that do not go together, before one that is misspelt lacks what the other has."""
    if not (
        isinstance(agents, dict)
        and isinstance(policies, dict)
        and all(isinstance(a, dict) for a in agents.values())
    ):
        return
    played = {
        name: str(agent.get("policy"))
        for name, agent in agents.items()
        if isinstance(agent.get("policy"), str)
    }
    for name, policy in played.items():
        if policy not in policies:
            near = nearest(policy, policies) or nearest(name, agents.keys() - {name})
            what = f"agent '{name}' plays policy '{policy}', which is not defined"
            raise ValueError(f"{what}; policies: {', '.join(policies)}{near}")
    if (idle := policies.keys() - played.values()) and len(played) == len(agents):
        near = nearest(min(idle), policies.keys() - idle)
        raise ValueError(
            f"policy '{min(idle)}' is played by no agent; remove it or name it in agents{near}"
        )


def for_policy(config: RunConfig, policy: str) -> RunConfig:
    """The run as one policy is trained and sampled: with its own settings of engine, loss and trainer.

    Raises:
        ValueError: they do not go with the run's.
    """
    own = config.policies[policy].own
    sections: dict[str, Section] = {
        "engine": config.engine,
        "loss": config.loss,
        "trainer": config.trainer,
    }
    for name, section in sections.items():
        if not getattr(own, name):
            continue
        values = own.merged_into(name, section)
        try:
            sections[name] = type(section).model_validate_json(
                to_json(values, inf_nan_mode="constants"), strict=True
            )
        except ValidationError as error:
            prefix = f"policies.{policy}.own.{name}"
            line = error_line(error, type(section), values, prefix=prefix)
            raise ValueError(line) from None
    mine = config.model_copy(update=sections)
    tokens, length = mine.trainer.microbatch_tokens, mine.engine.max_length
    if tokens < length:
        where = f"policies.{policy}.own: " if own.engine or own.trainer else ""
        raise ValueError(
            f"{where}trainer.microbatch_tokens {tokens} has no room for one sequence of engine.max_length {length}; "
            f"use microbatch_tokens: {length}, or max_length: {tokens}"
        )
    return mine


def engine_holder(config: RunConfig, policy: str) -> str:
    """The policy whose engine samples for `policy`: the holder of its model, where one engine has all adapters."""
    engine = for_policy(config, policy).engine
    return (
        config.holder(policy) if engine.name == "embedded" or engine.adapters == "slots" else policy
    )


def _check_engines(config: RunConfig) -> None:
    if config.engine.router_replay and not config.models:
        raise ValueError(
            "engine.router_replay: remote models say nothing of their experts; leave it out"
        )
    for name in config.models:
        engine, policy = for_policy(config, name).engine, config.policies[name]
        config.cluster.check_engine(name, engine)
        if policy.share_base:
            holder = config.holder(name)
            config.cluster.check_shared_engine(
                name, engine, holder, for_policy(config, holder).engine
            )
        if engine.adapters == "slots" and name in config.trained:
            alone = "engine.adapters: slots is of policies with lora"
            if problem := slot_problem(policy.lora.targets) if policy.lora else alone:
                raise ValueError(f"policies.{name}: {problem}")


def places_in_schedule(config: RunConfig, policy: str) -> int:
    """How long a schedule of the whole run is: the most updates that a trained policy can have in it.

    With mini-batches, whose number nobody knows beforehand, it is the policy's training steps.
    """
    trainer = for_policy(config, policy).trainer
    every = config.trainer.alternate is None and policy in config.trained
    steps = (
        trainer.steps
        if every
        else sum(policy in config.in_turn(step) for step in range(trainer.steps))
    )
    return steps if trainer.minibatch else trainer.passes * trainer.updates_per_step * steps


def _check_schedules(config: RunConfig) -> None:
    """Refuse turns that are not those of the trained policies, and rates that would end before their warm-up does."""
    alternate, trained = config.trainer.alternate, config.trained
    if alternate is not None and sorted(alternate.order) != sorted(trained):
        raise ValueError(
            f"trainer.alternate.order is {', '.join(alternate.order)}; expected every trained policy once: "
            f"{', '.join(trained)}"
        )
    for name in trained:
        policy = config.policies[name]
        for where, rate in ((name, policy), (f"{name}.critic", policy.critic)):
            last = (rate and rate.decay_steps) or places_in_schedule(config, name)
            if rate is not None and rate.schedule != "constant" and last <= rate.warmup_steps:
                raise ValueError(
                    f"policies.{where}: schedule '{rate.schedule}' ends with update {last}, but warmup_steps is "
                    f"{rate.warmup_steps}; lower it, or raise decay_steps"
                )


def _check_room(config: RunConfig) -> None:
    threads, engine = config.cluster.threads_per_process or 1, config.engine
    if threads > 1 and engine.deterministic and (engine.name, engine.device) == ("embedded", "cpu"):
        raise ValueError(
            f"cluster.threads_per_process: {threads}, and engine.deterministic has the same bits on a CPU with 1 "
            "thread only; set it to 1, or leave it out"
        )
    overlong = config.reward.penalties.get("overlong", {})
    for name, agent in config.agents.items():
        limit, buffer = (
            overlong.get("max_tokens", {}).get(name, agent.max_tokens),
            overlong.get("buffer", 0),
        )
        if buffer > limit:
            where = "reward.penalties.overlong.buffer"
            raise ValueError(
                f"{where} {buffer} is more than max_tokens {limit} of agent '{name}'; lower it"
            )
        length = for_policy(config, agent.policy).engine.max_length
        if agent.max_tokens >= length and config.policies[agent.policy].remote is None:
            raise ValueError(
                f"agents.{name}.max_tokens {agent.max_tokens} leaves no room for a prompt in engine.max_length "
                f"{length}; lower it, or raise max_length"
            )


def _check_credit(config: RunConfig) -> None:
    """Refuse what lacks what it needs, or can learn nothing."""
    for name, agent in config.agents.items():
        rule = config.advantage_of(name)
        what, need = f"agent '{name}': advantage '{rule.name}'", REQUIRED_COLUMN.get(rule.name)
        if (
            need == "values"
            and agent.policy in config.trained
            and config.policies[agent.policy].critic is None
        ):
            raise ValueError(f"{what} needs policies.{agent.policy}.critic")
        if need == "greedy" and config.reward.name == "tree_shaping":
            raise ValueError(
                f"{what} plays a greedy trajectory, which reward 'tree_shaping' has no reward for"
            )
        if need == "steps" and "trees" in config.contrasts:
            raise ValueError(
                f"{what} needs rewards of steps in one line of time, and trees have none; choose another"
            )
        if (
            agent.loss_weight and rule.options.get("lone") != "raw"
        ):  # whose lone votes have advantages too
            check_contrast(what, estimator_grouping(rule.name, rule.options), config.contrasts)
    branching, own = config.trainer.branching, config.reward.options.get("alpha", 1.0)
    if (
        config.reward.name == "local_team"
        and branching is not None
        and branching.alpha != 1.0
        and own != 1.0
    ):
        raise ValueError(
            f"reward.options.alpha {own:g} would multiply trainer.branching.alpha {branching.alpha:g}, which is in a "
            "branch's score already; leave one of them out"
        )
    if config.filter is not None:
        groups = filter_grouping(config.filter.name, config.filter.options)
        check_contrast(f"filter '{config.filter.name}'", groups, config.contrasts)


def _corrected(config: RunConfig) -> RunConfig:
    """With the correction that the config leaves open: TIS where a trained policy rounds to bfloat16."""
    if "correction" in config.loss.model_fields_set or all(
        config.precision_of(p) == "float32" for p in config.trained
    ):
        return config
    loss = config.loss.model_copy(update={"correction": CorrectionConfig(name="tis")})
    return config.model_copy(update={"loss": loss})


def _check_ahead(config: RunConfig) -> None:
    for name, policy in config.policies.items():
        if policy.staleness is not None and name not in config.trained:
            raise ValueError(f"policies.{name}.staleness: nothing trains this policy; leave it out")
    if not config.ahead:
        return
    most = max(config.staleness_of(name) for name in config.trained)
    if config.engine.sleep:
        raise ValueError(
            f"engine.sleep: engines have no rest while staleness is {most}; set one to 0 or false"
        )
    for name, policy in config.policies.items():
        if policy.offload:
            raise ValueError(
                f"policy '{name}': offload gives the trainer's memory away while the team acts, and with a "
                f"staleness of {most} the team acts while it trains; choose one of them"
            )
