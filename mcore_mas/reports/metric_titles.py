"""Titles and units of a run's metrics, for charts that people read."""

import re
from dataclasses import dataclass
from typing import Literal

# "share" is a fraction of 1, which charts show in per cent.
Unit = Literal["", "share", "s", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Title:
    """Title of a chart, and the unit of its values."""

    title: str
    unit: Unit = ""


# By name of the chart, in which "*" stands for the name of an agent, a policy, a data source or an
# opponent.
_TITLES = {
    "reward/mean": _Title(title="Mean reward of a turn"),
    "outcome/mean": _Title(title="Mean outcome of a trajectory"),
    "validation/accuracy": _Title(title="Validation accuracy", unit="share"),
    "validation/*/accuracy": _Title(title="Validation accuracy by source", unit="share"),
    "validation/exploitability": _Title(title="Exploitability, in points per game"),
    "validation/value": _Title(title="Expected payoff of the first player"),
    "validation/legal_probability": _Title(title="Probability of a legal reply", unit="share"),
    "opponent/*/score": _Title(title="Mean score by opponent", unit="share"),
    "opponent/*/member": _Title(title="Steps after which the weights were kept, by opponent"),
    "opponent/rating": _Title(title="Elo rating"),
    "validation/n": _Title(title="Validation tasks"),
    "agent/*/reward_mean": _Title(title="Reward by agent"),
    "agent/*/reward_std": _Title(title="Standard deviation of rewards by agent"),
    "agent/*/valid_ratio": _Title(title="Well-formed replies by agent", unit="share"),
    "agent/*/response_length": _Title(title="Length of a reply by agent", unit="tokens"),
    "agent/*/calls": _Title(title="Turns by agent"),
    "agent/*/masked": _Title(title="Turns without training by agent"),
    "agent/*/entropy": _Title(title="Entropy of trained tokens by agent"),
    "agent/*/sampled_entropy": _Title(title="Mean −log p of sampled tokens by agent"),
    "agent/*/kl": _Title(title="KL divergence from the sampling policy by agent"),
    "agent/*/reference_kl": _Title(title="KL divergence from the reference by agent"),
    "agent/*/clip_fraction": _Title(title="Clipped tokens by agent", unit="share"),
    "agent/*/grad_norm": _Title(title="Gradient norm by agent"),
    "agent/*/gradient_share": _Title(title="Share of the policy's gradient by agent", unit="share"),
    "agent/*/advantage_second_moment": _Title(title="Mean square of advantages by agent"),
    "agent/*/advantage_abs_max": _Title(title="Largest absolute advantage by agent"),
    "agent/*/advantage_share": _Title(
        title="Turns whose advantage is not 0 by agent", unit="share"
    ),
    "policy/*/grad_norm": _Title(title="Gradient norm by policy"),
    "policy/*/teacher_kl": _Title(
        title="Reverse KL divergence from the teacher by policy, in nats per token"
    ),
    "policy/*/lr": _Title(title="Learning rate by policy"),
    "policy/*/loss": _Title(title="Loss by policy"),
    "policy/*/tokens_saved": _Title(title="Tokens saved by shared prefixes", unit="share"),
    "policy/*/effective_sample_size": _Title(title="Effective sample size by policy, in replies"),
    "policy/*/effective_sample_share": _Title(
        title="Effective share of the replies by policy", unit="share"
    ),
    "rollout/trajectories": _Title(title="Trajectories of a step"),
    "rollout/failed": _Title(title="Failed trajectories of a step"),
    "rollout/turns": _Title(title="Turns of a trajectory"),
    "rollout/tokens": _Title(title="Sampled tokens of a step", unit="tokens"),
    "staleness/mean": _Title(title="Mean age of trained turns, in updates"),
    "staleness/max": _Title(title="Largest age of a trained turn, in updates"),
    "time/collect_s": _Title(title="Time to collect trajectories", unit="s"),
    "time/update_s": _Title(title="Time to update the policies", unit="s"),
    "time/tokens_per_s": _Title(title="Sampled tokens per second of the whole step"),
    "time/tflops": _Title(title="TFLOP/s of a GPU in updates"),
    "time/mfu": _Title(title="MFU in updates (share of the GPU's peak FLOP/s)", unit="share"),
}

# Units of metrics that are not in `_TITLES`, by the end of their names. If several fit, the last one
# decides.
_UNITS_BY_ENDING: dict[str, Unit] = {
    "accuracy": "share",
    "ci_low": "share",
    "ci_high": "share",
    "clip_fraction": "share",
    "valid_ratio": "share",
    "_rate": "share",
    "_share": "share",
    "/mfu": "share",
    "_tokens": "tokens",
    "_s": "s",
    "_per_s": "",
}
# Ends of the titles of metrics that have a value for each member of a group, by group.
_GROUPS = {
    "agent": "by agent",
    "policy": "by policy",
    "validation": "by source",
    "opponent": "by opponent",
}
_MEMBER = re.compile(rf"(?P<group>{'|'.join(_GROUPS)})/(?P<member>[^/]+)/(?P<name>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricChart:
    """Chart of a metric, and the member of a group whose line the metric is.

    Attributes:
        chart: name of the chart: that of the metric, with "*" in place of the member.
        member: name of the agent, the policy, the data source or the opponent; "" for other metrics.
        title: title of the chart.
        unit: unit of the values.
    """

    chart: str
    member: str
    title: str
    unit: Unit


def metric_chart(name: str) -> MetricChart:
    """Return the chart of a metric. A chart that is not in `_TITLES` gets a title made from its name."""
    match = _MEMBER.fullmatch(name)
    if match is None:
        title = _TITLES.get(name) or _Title(title=_words(name), unit=_unit_by_ending(name))
        return MetricChart(chart=name, member="", title=title.title, unit=title.unit)

    chart = f"{match['group']}/*/{match['name']}"
    made_title = f"{_words(match['name'])} {_GROUPS[match['group']]}"
    title = _TITLES.get(chart) or _Title(title=made_title, unit=_unit_by_ending(name))
    return MetricChart(chart=chart, member=match["member"], title=title.title, unit=title.unit)


def _words(name: str) -> str:
    """Return the words of a metric's name, with a capital letter at the beginning."""
    words = re.sub(r"[/_]+", " ", name).strip()
    return f"{words[:1].upper()}{words[1:]}"


def _unit_by_ending(name: str) -> Unit:
    unit: Unit = ""
    for ending, ending_unit in _UNITS_BY_ENDING.items():
        if name.endswith(ending):
            unit = ending_unit
    return unit
