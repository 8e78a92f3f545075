"""Published experiments: their hyper-parameters beside the papers'."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from typing import Any

from mcore_mas import SHIPPED
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.equations.losses import LOSSES
from mcore_mas.rollout.base.files import read_yaml

UNKNOWN = "unknown"
_TURNS = ("max_turns", "max_loops", "rounds", "max_nodes", "max_programs")  # options of orchestras


def _one(values: Iterable[Any]) -> Any:
    """The value that all have, or the different ones."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different[0] if len(different) == 1 else different


def _of_policies(key: str) -> Callable[[RunConfig], Any]:
    return lambda config: _one(getattr(policy, key) for policy in config.policies.values())


def _of_agents(key: str) -> Callable[[RunConfig], Any]:
    return lambda config: _one(getattr(agent, key) for agent in config.agents.values())


def _of_loss(key: str) -> Callable[[RunConfig], Any]:
    def value(config: RunConfig) -> Any:
        return config.loss.options.get(key, inspect.signature(LOSSES[config.loss.name]).parameters[key].default)

    return value


def _filter(config: RunConfig) -> Any:
    numbers = [value for value in config.filter.options.values() if isinstance(value, float)] if config.filter else []
    return [config.filter.name, *numbers] if config.filter else None


def _kl(config: RunConfig) -> Any:
    kl = config.loss.kl
    return [kl.coef, kl.estimate, kl.where] if kl.coef else 0.0


HYPERPARAMETERS: Mapping[str, Callable[[RunConfig], Any]] = {
    "estimator": lambda config: _one(config.advantage_of(agent).name for agent in config.agents),
    "learning rate": _of_policies("lr"),
    "warm-up": _of_policies("warmup_steps"),  # updates
    "schedule": _of_policies("schedule"),
    "final learning rate": _of_policies("min_lr"),
    "betas": lambda config: _one(list(policy.betas) for policy in config.policies.values()),
    "weight decay": _of_policies("weight_decay"),
    "gradient clip": _of_policies("clip_grad"),
    "critic learning rate": lambda config: _one(p.critic.lr if p.critic else None for p in config.policies.values()),
    "tasks per step": lambda config: config.trainer.tasks_per_step,
    "group size": lambda config: (
        config.trainer.branching.width if config.trainer.branching else config.trainer.group_size
    ),
    "updates per step": lambda config: (
        f"mini-batches of {config.trainer.minibatch} rows"
        if config.trainer.minibatch
        else config.trainer.updates_per_step
    ),
    "steps": lambda config: config.trainer.steps,
    "lower clip": _of_loss("clip_low"),
    "upper clip": _of_loss("clip_high"),
    "dual clip": _of_loss("dual_clip"),
    "aggregation": lambda config: config.loss.aggregation,
    "entropy": lambda config: config.loss.entropy,
    "KL": _kl,
    "temperature": _of_agents("temperature"),
    "top-p": _of_agents("top_p"),
    "top-k": _of_agents("top_k"),
    "reply tokens": _of_agents("max_tokens"),
    "prompt tokens": lambda config: config.engine.max_length - max(a.max_tokens for a in config.agents.values()),
    "turns": lambda config: next(
        (config.orchestra.options[key] for key in _TURNS if key in config.orchestra.options), None
    ),
    "malformed reply": lambda config: config.reward.penalties.get("invalid", {}).get("coef", 0.0),
    "thinking": lambda config: _one(p.chat_template_kwargs.get("enable_thinking") for p in config.policies.values()),
    "evaluation samples": lambda config: config.evaluation.samples,
    "evaluation temperature": lambda config: config.evaluation.temperature,
    "evaluation top-p": lambda config: config.evaluation.top_p,
    "filter": _filter,
    "seed": lambda config: config.seed,
    "prompts": lambda config: "ours",  # of every role, see docs/catalogue.md
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedValue:
    """One hyper-parameter of an experiment, in the paper and here."""

    name: str
    ours: Any
    theirs: Any  # UNKNOWN where neither paper nor code gives it
    source: str  # where theirs is read
    reason: str  # why ours is another; "" where none is given

    @property
    def differs(self) -> bool:
        """Whether theirs is known and another."""
        return bool(self.theirs != UNKNOWN and self.ours != self.theirs)

    def __str__(self) -> str:
        return f"{self.name} {_shown(self.ours)}, published {_shown(self.theirs)}: {self.reason}"


@cache
def read_published() -> dict[str, Any]:
    """docs/published.yaml: `sources`, `families`, `hardware` and `rows`."""
    return dict(read_yaml(SHIPPED / "docs" / "published.yaml"))


@cache
def published_values(experiment: str) -> dict[str, PublishedValue]:
    """The hyper-parameters of an experiment that docs/published.yaml says anything about, by name."""
    theirs: dict[str, tuple[Any, str]] = {}
    reasons: dict[str, str] = {}
    for family in read_published()["families"]:
        if any(fnmatch(experiment, pattern) for pattern in family["of"]):
            theirs |= dict.fromkeys(family.get("unknown", ()), (UNKNOWN, ""))
            theirs |= {name: (value, source) for name, (value, source) in family.get("values", {}).items()}
            reasons |= family.get("differs", {})
    config = RunConfig.check(resolve([f"experiment={experiment}"]), experiment)
    return {
        name: PublishedValue(
            name=name, ours=HYPERPARAMETERS[name](config), theirs=value, source=source, reason=reasons.get(name, "")
        )
        for name, (value, source) in theirs.items()
    }


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
