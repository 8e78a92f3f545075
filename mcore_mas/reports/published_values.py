"""Hyper-parameters of published experiments: the paper's values beside ours.

docs/published.yaml has the values of the papers and the reasons for differences. `published_values`
compares them with the config of an experiment.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from typing import Any

from mcore_mas import SHIPPED
from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import expand_braces
from mcore_mas.config.run import RunConfig
from mcore_mas.equations.advantages import ESTIMATORS, TOKEN_LEVEL_ESTIMATORS
from mcore_mas.equations.losses import LOSSES
from mcore_mas.reports.paper_tables import PaperTable
from rollout.base.yaml_files import read_yaml
from rollout.config.choice import Choice

UNKNOWN = "unknown"  # value of a hyper-parameter that neither the paper nor its code gives

# Options of orchestras that limit the number of turns.
_TURN_LIMITS = ("max_turns", "max_loops", "rounds", "max_nodes", "max_programs")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedValue:
    """One hyper-parameter of an experiment, in the paper and here."""

    name: str
    ours: Any
    theirs: Any  # or UNKNOWN
    source: str  # key of `sources` in docs/published.yaml
    reason: str  # why our value is another one, or ""

    @property
    def differs(self) -> bool:
        """True if the paper's value is known and ours is another one."""
        return bool(self.theirs != UNKNOWN and self.ours != self.theirs)

    def __str__(self) -> str:
        ours = _format_value(self.ours)
        theirs = _format_value(self.theirs)
        return f"{self.name} {ours}, published {theirs}: {self.reason}"


@cache
def read_published() -> dict[str, Any]:
    """Read docs/published.yaml, whose first lines explain its sections."""
    return dict(read_yaml(SHIPPED / "docs" / "published.yaml"))


@cache
def published_values(experiment: str) -> dict[str, PublishedValue]:
    """Return the hyper-parameters of an experiment that docs/published.yaml lists, by name."""
    theirs: dict[str, Any] = {}
    sources: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for family in read_published()["families"]:
        if not any(fnmatch(experiment, pattern) for pattern in family["experiments"]):
            continue
        # If an experiment is in several families, later ones take precedence.
        for name in family.get("unknown", ()):
            theirs[name] = UNKNOWN
            sources[name] = ""
        for name, (value, source) in family.get("values", {}).items():
            theirs[name] = value
            sources[name] = source
        reasons |= family.get("reasons", {})

    ours = compared_values(RunConfig.from_values(resolve([f"experiment={experiment}"]), experiment))
    return {
        name: PublishedValue(
            name=name,
            ours=ours[name],
            theirs=value,
            source=sources[name],
            reason=reasons.get(name, ""),
        )
        for name, value in theirs.items()
    }


def compared_values(config: RunConfig) -> dict[str, Any]:
    """Return every hyper-parameter of a run that is compared with a paper's, by name."""
    keys: Mapping[str, str] = read_published()["hyperparameters"]
    values = {name: _value_at(config, key.split(".")) for name, key in keys.items()}
    computed = {name: compute(config) for name, compute in COMPUTED.items()}
    return {**values, **computed}


def known_deviations(table: PaperTable) -> list[str]:
    """Return the known differences between a table's experiments and the paper.

    Experiments with the same differences share a line, which names them.
    """
    other_differences = {}  # those that no hyper-parameter shows, by experiment
    # Each of these rows is about the experiments of one pattern, and not a row of the table.
    for row in read_published()["rows"]:
        for experiment, _ in expand_braces(row["experiments"]):
            other_differences[experiment] = row["differences"]

    experiments_by_text: dict[str, list[str]] = {}
    for experiment in table.experiments:
        values = published_values(experiment).values()
        differences = [other_differences.get(experiment, "")]
        differences += [str(value) for value in values if value.differs]
        text = "; ".join(difference for difference in differences if difference)
        if text:
            experiments_by_text.setdefault(text, []).append(f"`{experiment}`")
    return [f"{', '.join(names)}: {text}" for text, names in experiments_by_text.items()]


def _format_value(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _common_value(values: Iterable[Any]) -> Any:
    """Return the value if all values are equal, else the list of distinct values."""
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct[0] if len(distinct) == 1 else distinct


def _value_at(value: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys, None if a key is missing.

    The key `*` stands for every policy or agent, whose values `_common_value` joins.
    """
    for position, key in enumerate(path, start=1):
        if key == "*":
            return _common_value(_value_at(member, path[position:]) for member in value.values())
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    return list(value) if isinstance(value, tuple) else value


def _loss_option(option: str, config: RunConfig) -> Any:
    """Return an option of the loss, or its default; None if the loss has no such option."""
    return _option_or_default(LOSSES[config.loss.name], config.loss, option)


def _describe_choice(choice: Choice | None) -> Any:
    """Return [name, *options that are floats] of a choice; None without a choice.

    The choice "none" has no options, so its name is returned without a list.
    """
    if choice is None:
        return None
    if choice.name == "none":
        return choice.name
    numbers = [value for value in choice.options.values() if isinstance(value, float)]
    return [choice.name, *numbers]


def _estimator_option(estimators: Collection[str], option: str, config: RunConfig) -> Any:
    """Return the value of an option in the estimators of all agents, joined by `_common_value`.

    Args:
        estimators: names of the estimators to look at; for an agent with another one, the value is
            None.
        option: name of the option.
        config: config of the run.
    """
    values = []
    for agent in config.agents:
        estimator = config.advantage_of(agent)
        value = None
        if estimator.name in estimators:
            value = _option_or_default(ESTIMATORS[estimator.name], estimator, option)
        values.append(value)
    return _common_value(values)


def _option_or_default(function: Callable[..., Any], choice: Choice, option: str) -> Any:
    """Return an option of a chosen function, or its default; None if the function has no such option."""
    parameters = inspect.signature(function).parameters
    if option not in parameters:
        return None
    return choice.options.get(option, parameters[option].default)


def _estimator(config: RunConfig) -> Any:
    return _common_value(config.advantage_of(agent).name for agent in config.agents)


def _group_size(config: RunConfig) -> int:
    """Return the number of trajectories of a task; with tree sampling, the number of branches."""
    branching = config.trainer.branching
    return branching.width if branching else config.trainer.group_size


def _updates_per_step(config: RunConfig) -> Any:
    if config.trainer.minibatch:
        return f"mini-batches of {config.trainer.minibatch} rows"
    return config.trainer.updates_per_step


def _kl(config: RunConfig) -> Any:
    """Return [coefficient, estimate, place] of the KL term; 0.0 without one."""
    kl = config.loss.kl
    return [kl.coef, kl.estimate, kl.where] if kl.coef else 0.0


def _prompt_tokens(config: RunConfig) -> int:
    """Return the number of tokens that the longest reply leaves for its prompt."""
    return config.engine.max_length - max(agent.max_tokens for agent in config.agents.values())


def _turns(config: RunConfig) -> Any:
    """Return the option with which the orchestra limits its turns; None if it has no such option."""
    for option in _TURN_LIMITS:
        if option in config.orchestra.options:
            return config.orchestra.options[option]
    return None


def _malformed_penalty(config: RunConfig) -> float:
    return float(config.reward.penalties.get("invalid", {}).get("coef", 0.0))


def _tree_weights(config: RunConfig) -> list[Any]:
    """Return [gamma, lam] of the estimators of trees."""
    return [_estimator_option(("mcts", "mars2"), option, config) for option in ("gamma", "lam")]


# Hyper-parameters that are computed from a config, by name. The others are values in a config, whose
# keys are in docs/published.yaml.
COMPUTED: Mapping[str, Callable[[RunConfig], Any]] = {
    "estimator": _estimator,
    "group size": _group_size,
    "updates per step": _updates_per_step,
    "lower clip": partial(_loss_option, "clip_low"),
    "upper clip": partial(_loss_option, "clip_high"),
    "dual clip": partial(_loss_option, "dual_clip"),
    "KL": _kl,
    "prompt tokens": _prompt_tokens,
    "turns": _turns,
    "malformed reply": _malformed_penalty,
    "filter": lambda config: _describe_choice(config.filter),
    "correction": lambda config: _describe_choice(config.loss.correction),
    "discount": partial(_estimator_option, TOKEN_LEVEL_ESTIMATORS, "gamma"),
    "lambda": partial(_estimator_option, TOKEN_LEVEL_ESTIMATORS, "lam"),
    "tree weights": _tree_weights,
    "prompts": lambda config: "ours",  # the prompts of all roles are our own
}
