"""Metrics of a step: what its trajectories say, as numbers by agent."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean, pstdev

from mcore_mas.credit.samples import Sample
from rollout.records.trajectory import Group, Status, Trajectory, Turn, grouped

StepMetrics = dict[str, float]


def rollout_metrics(groups: Sequence[Group]) -> StepMetrics:
    """Outcome, failures and each agent's behaviour over the completed trajectories of `groups`."""
    trajectories = [t for group in groups for t in group.trajectories]
    completed = [t for t in trajectories if t.status is Status.COMPLETED]
    metrics = {
        "rollout/failed": float(len(trajectories) - len(completed)),
        "rollout/trajectories": float(len(trajectories)),
    }
    metrics |= _lost(trajectories)
    if not completed:
        return metrics
    turns = grouped((turn.agent, turn) for trajectory in completed for turn in trajectory.turns)
    metrics |= {
        "reward/mean": fmean(t.outcome or 0.0 for t in completed),
        "rollout/turns": fmean(len(t.path) for t in completed),
        "rollout/tokens": float(
            sum(len(turn.completion_ids) for own in turns.values() for turn in own)
        ),
    }
    metrics |= _chats([turn for own in turns.values() for turn in own if turn.chat])
    for agent, own in turns.items():
        prefix = f"agent/{agent}"
        metrics[f"{prefix}/calls"] = float(len(own))
        metrics[f"{prefix}/valid_ratio"] = fmean(turn.valid for turn in own)
        metrics[f"{prefix}/masked"] = float(sum(turn.masked for turn in own))
        if undecided := sum("undecided" in turn.scores for turn in own):
            metrics[f"{prefix}/undecided"] = float(undecided)
        metrics[f"{prefix}/response_length"] = fmean(len(turn.completion_ids) for turn in own)
        if logprobs := [value for turn in own for value in turn.logprobs]:
            metrics[f"{prefix}/sampled_entropy"] = -fmean(
                logprobs
            )  # of all turns: `entropy` is of those that train
        rewards = [turn.reward for turn in own if turn.reward is not None]
        if rewards:
            metrics[f"{prefix}/reward_mean"] = fmean(rewards)
            metrics[f"{prefix}/reward_std"] = pstdev(rewards)
    return metrics


def _lost(trajectories: Sequence[Trajectory]) -> StepMetrics:
    """What was late, by agent, tool or whole, and how many were given up, undecided, refused, quarantined; if any."""
    late: Counter[str] = Counter()
    for trajectory in trajectories:
        for name, count in trajectory.metrics.items():
            if name.startswith("late/"):
                what = name.removeprefix("late/")
                late[f"{what}/late" if "/" in what else f"rollout/late_{what}"] += int(count)
    aborted = sum(t.status is Status.ABORTED for t in trajectories)
    counts = {"rollout/aborted": aborted} | {
        f"rollout/{name}": sum(int(t.metrics.get(name, 0)) for t in trajectories)
        for name in ("undecided", "refused", "quarantined")
    }
    return {name: float(n) for name, n in late.items()} | {
        name: float(n) for name, n in counts.items() if n
    }


# scores of turns, by the names that their sums have
_CHAT_SCORES = {name: name for name in ("malformed_calls", "folded", "dropped_results", "full")}
_CHAT_SCORES |= {"calls": "tool_calls", "roots": "root"}


def _chats(turns: Sequence[Turn]) -> StepMetrics:
    """Turns of chats, and sums over them of what is written down of chats (see `Turn`); nothing without any."""
    if not turns:
        return {}
    sums = {
        f"chat/{name}": sum(t.scores.get(score, 0.0) for t in turns)
        for name, score in _CHAT_SCORES.items()
    }
    return {"chat/turns": float(len(turns))} | {name: float(value) for name, value in sums.items()}


def staleness_metrics(samples: Sequence[Sample]) -> StepMetrics:
    """By how many versions turns were behind the weights that they trained, in all and by policy.

    Mean, maximum, and how many turns by how many versions.
    """
    ages = grouped(
        (whose, sample.age) for sample in samples for whose in ("", f"policy/{sample.policy}/")
    )
    metrics: dict[str, float] = {}
    for whose, own in ages.items():
        metrics |= {f"{whose}staleness/mean": fmean(own), f"{whose}staleness/max": float(max(own))}
        metrics |= {
            f"{whose}staleness/turns_{age}": float(turns)
            for age, turns in sorted(Counter(own).items())
        }
    return metrics


def credit_metrics(samples: Sequence[Sample]) -> StepMetrics:
    """Each agent's advantages A: mean A² and largest |A|, over turns, and the share of its turns with A other than 0.

    The second moment is what Dr. MAS's Lemma 4.2 ties to the agent's gradient.
    """
    training = (sample for sample in samples if sample.tokens)  # others only count for their peers
    by_agent = grouped((sample.agent, sample.advantages or (0.0,)) for sample in training)
    metrics: dict[str, float] = {}
    for agent, own in by_agent.items():
        metrics |= {
            f"agent/{agent}/advantage_second_moment": fmean(
                [fmean([a * a for a in turn]) for turn in own]
            ),
            f"agent/{agent}/advantage_abs_max": max(max(max(turn), -min(turn)) for turn in own),
            f"agent/{agent}/advantage_share": fmean(any(turn) for turn in own),
        }
    return metrics


def speed_metrics(updates: Mapping[str, StepMetrics]) -> StepMetrics:
    """TFLOP/s of a device in updates, in all and by policy, its critic's with it; and their share of a known peak."""
    spent = {
        f"policy/{policy}/": [
            (row[f"{of}flops"], row[f"{of}device_s"], row.get(f"{of}peak_flops", math.nan))
            for of in ("", "critic/")
            if f"{of}device_s" in row
        ]
        for policy, row in updates.items()
    }
    metrics: StepMetrics = {}
    for whose, own in {"": list(chain(*spent.values())), **spent}.items():
        flops, seconds, peak = map(sum, zip(*own, strict=True)) if own else (0.0, 0.0, math.nan)
        metrics |= {f"{whose}time/tflops": flops / seconds / 1e12} if seconds else {}
        metrics |= {} if math.isnan(peak) else {f"{whose}time/mfu": flops / peak}
    return metrics


def success(groups: Sequence[Group]) -> tuple[float, float]:
    """(Mean success, share of well-formed turns) over completed trajectories; (NaN, NaN), unknown, without any."""
    completed = [t for group in groups for t in group.trajectories if t.status is Status.COMPLETED]
    turns = [turn.valid for t in completed for turn in t.turns]
    if not turns:
        return math.nan, math.nan
    return fmean(t.success for t in completed), fmean(turns)


def losses(groups: Sequence[Group]) -> str:
    """One line on the trajectories that say nothing, or "": how many, how they ended, and the first one's error.

    Those that were given up because their group was full are no loss.
    """
    played = [t for group in groups for t in group.trajectories]
    lost = [
        t
        for t in played
        if t.status is not Status.COMPLETED
        and (t.status is not Status.ABORTED or "late/batch" in t.metrics)
    ]
    if not lost:
        return ""
    counts = Counter(t.status.value for t in lost)
    how = ", ".join(f"{n} {status}" for status, n in counts.items())
    return f"{len(lost)} of {len(played)} trajectories are lost ({how}); the first, {lost[0].id}: {lost[0].error}"
