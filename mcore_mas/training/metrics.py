"""Metrics of a training step, computed from its trajectories, samples and updates."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import explained_variance
from rollout.orchestras.program import CRASH_EVENT
from rollout.records.grouping import group_pairs
from rollout.records.trajectory import REPLAY_OUTCOME, Group, Status, Trajectory, Turn

StepMetrics = dict[str, float]

# Metrics of chats, and the scores of turns that they sum.
_CHAT_SCORES = {
    "chat/malformed_calls": "malformed_calls",
    "chat/folded": "folded",
    "chat/dropped_results": "dropped_results",
    "chat/full": "full",
    "chat/calls": "tool_calls",
    "chat/roots": "root",
}

# Scores of agent programs' turns, each summed as the metric gateway/SCORE where a turn has it.
_PROGRAM_SCORES = ("crashed", "unread", "off_schema")
_UNHEEDED = "unheeded/"  # begins the scores that count fields of calls that the gateway leaves out

# Metrics of an update that are summed over the updates of a step, in addition to names that end with
# _count.
_SUMMED = frozenset({"grad_spikes", "skipped_updates", "tokens", "flops", "device_s", "peak_flops"})


def rollout_metrics(groups: Sequence[Group]) -> StepMetrics:
    """Return rewards, failures and lengths of a step's trajectories, in all and by agent.

    Everything but failures is measured on completed trajectories. `reward/mean` is the mean of the
    rewards that the turns are trained with, and `outcome/mean` that of the environment's outcomes.
    They differ where a reward of the user's, or a penalty, comes between the two.
    """
    trajectories = all_trajectories(groups)
    completed = _completed(groups)
    metrics = {
        "rollout/failed": float(len(trajectories) - len(completed)),
        "rollout/trajectories": float(len(trajectories)),
    }
    metrics |= _late_calls(trajectories)
    metrics |= _failure_counts(trajectories)
    if not completed:
        return metrics

    turns = [turn for trajectory in completed for turn in trajectory.turns]
    rewards = [turn.reward for turn in turns if turn.reward is not None]
    if rewards:
        metrics["reward/mean"] = fmean(rewards)
    metrics["outcome/mean"] = fmean(trajectory.outcome or 0.0 for trajectory in completed)
    metrics["rollout/turns"] = fmean(len(trajectory.path) for trajectory in completed)
    metrics["rollout/tokens"] = float(sum(len(turn.completion_ids) for turn in turns))
    metrics |= _replay_metrics(completed)
    metrics |= _chat_metrics([turn for turn in turns if turn.chat])
    metrics |= _program_metrics(turns)
    for agent, agent_turns in group_pairs((turn.agent, turn) for turn in turns).items():
        for name, value in _agent_metrics(agent_turns).items():
            metrics[f"agent/{agent}/{name}"] = value
    return metrics


def _agent_metrics(turns: Sequence[Turn]) -> StepMetrics:
    """Return how an agent behaved in its turns: validity, lengths, sampled entropy and rewards."""
    metrics = {
        "calls": float(len(turns)),
        "valid_ratio": fmean(turn.valid for turn in turns),
        "masked": float(sum(turn.masked for turn in turns)),
        "response_length": fmean(len(turn.completion_ids) for turn in turns),
    }
    undecided = sum("undecided" in turn.scores for turn in turns)
    if undecided:
        metrics["undecided"] = float(undecided)

    logprobs = [logprob for turn in turns for logprob in turn.logprobs]
    if logprobs:
        # Over all turns; the metric `entropy` of an update is over those that are trained.
        metrics["sampled_entropy"] = -fmean(logprobs)

    rewards = [turn.reward for turn in turns if turn.reward is not None]
    if rewards:
        metrics["reward_mean"] = fmean(rewards)
        metrics["reward_std"] = pstdev(rewards)
    return metrics


def _late_calls(trajectories: Sequence[Trajectory]) -> StepMetrics:
    """Return how many calls and trajectories were late.

    Late calls of an agent are agent/NAME/late, and those of a tool tool/NAME/late. Trajectories that
    passed their own deadline are rollout/late_trajectory, and those that passed the deadline of
    their batch rollout/late_batch.
    """
    counts: Counter[str] = Counter()
    for trajectory in trajectories:
        for name, count in trajectory.metrics.items():
            if not name.startswith("late/"):
                continue
            part = name.removeprefix("late/")
            metric = f"{part}/late" if "/" in part else f"rollout/late_{part}"
            counts[metric] += int(count)
    return {name: float(count) for name, count in counts.items()}


def _failure_counts(trajectories: Sequence[Trajectory]) -> StepMetrics:
    """Return the numbers of trajectories that were aborted, failed for some reasons, or were refused.

    A refused trajectory is completed, and its answer counts as wrong: comparing it with the right
    one would take too much computation (`is_refused`). Counts of 0 are left out.
    """
    counts = {"aborted": sum(trajectory.status is Status.ABORTED for trajectory in trajectories)}
    for name in ("undecided", "refused", "unasked", "quarantined"):
        counts[name] = sum(int(trajectory.metrics.get(name, 0)) for trajectory in trajectories)
    return {f"rollout/{name}": float(count) for name, count in counts.items() if count}


def _replay_metrics(trajectories: Sequence[Trajectory]) -> StepMetrics:
    """Return the number of alternative replies, and of the tokens of their replays; {} without replays.

    A replay plays a trajectory again from one turn on, with another sampled reply or an empty one
    in place of that turn's. The tokens are those that it sampled after this reply.
    """
    scores = [turn.scores for trajectory in trajectories for turn in trajectory.turns]
    alternatives = sum(REPLAY_OUTCOME in turn_scores for turn_scores in scores)
    if not alternatives:
        return {}
    tokens = sum(trajectory.metrics.get("replayed_tokens", 0.0) for trajectory in trajectories)
    return {"rollout/alternatives": float(alternatives), "rollout/replayed_tokens": tokens}


def _chat_metrics(turns: Sequence[Turn]) -> StepMetrics:
    """Return the number of turns in chats and the sums of their scores; {} without chats."""
    if not turns:
        return {}
    metrics = {"chat/turns": float(len(turns))}
    for metric, score in _CHAT_SCORES.items():
        metrics[metric] = float(sum(turn.scores.get(score, 0.0) for turn in turns))
    return metrics


def _program_metrics(turns: Sequence[Turn]) -> StepMetrics:
    """Return the sums of the scores that the calls of agent programs have; {} without any."""
    metrics: StepMetrics = defaultdict(float)
    for turn in turns:
        for name, value in turn.scores.items():
            if name in _PROGRAM_SCORES or name.startswith(_UNHEEDED):
                metrics[f"gateway/{name}"] += value
    return dict(metrics)


def describe_unheeded(groups: Sequence[Group], noted: set[str]) -> str:
    """Return a line on fields of agent programs' calls that the gateway has ignored; "" if none is new.

    Args:
        groups: groups of a step.
        noted: fields that a line has named before; new ones are added.
    """
    names: set[str] = set()
    for trajectory in all_trajectories(groups):
        for turn in trajectory.turns:
            unheeded = [name for name in turn.scores if name.startswith(_UNHEEDED)]
            names.update(name.removeprefix(_UNHEEDED) for name in unheeded)
    new_names = sorted(names - noted)
    noted.update(new_names)
    if not new_names:
        return ""
    return (
        f"calls of agent programs have parts that the gateway ignores: {', '.join(new_names)} "
        "(docs/gateway.md; metrics gateway/unheeded/*)"
    )


def staleness_metrics(samples: Sequence[Sample]) -> StepMetrics:
    """Return statistics of the ages of turns.

    An age is the number of weight updates between the sampling of a turn and its training.

    Returns:
        staleness/mean, staleness/max, and staleness/turns_N with the number of turns of age N; and
        the same for each policy, as policy/NAME/staleness/....
    """
    ages: dict[str, list[int]] = defaultdict(list)
    for sample in samples:
        for prefix in ("", f"policy/{sample.policy}/"):
            ages[prefix].append(sample.age)

    metrics: StepMetrics = {}
    for prefix, values in ages.items():
        metrics[f"{prefix}staleness/mean"] = fmean(values)
        metrics[f"{prefix}staleness/max"] = float(max(values))
        for age, turns in sorted(Counter(values).items()):
            metrics[f"{prefix}staleness/turns_{age}"] = float(turns)
    return metrics


def credit_metrics(samples: Sequence[Sample]) -> StepMetrics:
    """Return statistics of each agent's advantages A over its turns that are trained.

    They are the mean of A², the largest |A|, and the share of turns with an A other than 0. Lemma
    4.2 of Dr. MAS relates the mean of A² to the norm of the agent's gradient.
    """
    advantages: dict[str, list[Sequence[float]]] = defaultdict(list)  # of each turn, by agent
    for sample in samples:
        if sample.trained_tokens:
            advantages[sample.agent].append(sample.advantages or (0.0,))

    metrics: StepMetrics = {}
    for agent, turns in advantages.items():
        prefix = f"agent/{agent}"
        squares = [fmean([value * value for value in turn]) for turn in turns]
        largest = max(max(max(turn), -min(turn)) for turn in turns)
        metrics[f"{prefix}/advantage_second_moment"] = fmean(squares)
        metrics[f"{prefix}/advantage_abs_max"] = largest
        metrics[f"{prefix}/advantage_share"] = fmean(any(turn) for turn in turns)
    return metrics


def speed_metrics(updates: Mapping[str, StepMetrics]) -> StepMetrics:
    """Return the mean TFLOP/s of a device during updates, and the share of its peak (MFU) if known.

    Args:
        updates: metrics of a step's updates, by policy. A critic's work counts as its policy's.

    Returns:
        time/tflops and time/mfu over all policies, and the same for each policy, as
        policy/NAME/time/tflops and policy/NAME/time/mfu.
    """
    rows_by_policy = {policy: _device_rows(row) for policy, row in updates.items()}
    all_rows = [row for rows in rows_by_policy.values() for row in rows]
    metrics = _device_speed("", all_rows)
    for policy, rows in rows_by_policy.items():
        metrics |= _device_speed(f"policy/{policy}/", rows)
    return metrics


class _DeviceWork(NamedTuple):
    """Work of all devices of a trainer in the updates of a step.

    Attributes:
        flops: floating-point operations of the updates.
        seconds: seconds that they took, summed over the devices.
        possible_flops: operations that the devices could do in these seconds; NaN if their peak is
            not known.
    """

    flops: float
    seconds: float
    possible_flops: float


def _device_rows(update: StepMetrics) -> list[_DeviceWork]:
    """Return the work of a policy's trainer and of its critic, from the metrics of their updates."""
    rows = []
    for prefix in ("", "critic/"):
        if f"{prefix}device_s" in update:
            work = _DeviceWork(
                flops=update[f"{prefix}flops"],
                seconds=update[f"{prefix}device_s"],
                # The metric is a number of operations. Its name is that of a rate, and stays because
                # files of existing runs have it.
                possible_flops=update.get(f"{prefix}peak_flops", math.nan),
            )
            rows.append(work)
    return rows


def _device_speed(prefix: str, rows: Sequence[_DeviceWork]) -> StepMetrics:
    """Return TFLOP/s per device, and their share of the devices' peak, as metrics whose names begin with `prefix`."""
    flops = sum(row.flops for row in rows)
    seconds = sum(row.seconds for row in rows)
    possible_flops = sum(row.possible_flops for row in rows)
    metrics: StepMetrics = {}
    if seconds:
        metrics[f"{prefix}time/tflops"] = flops / seconds / 1e12
    if rows and not math.isnan(possible_flops):
        metrics[f"{prefix}time/mfu"] = flops / possible_flops
    return metrics


def merge_updates(rows: Sequence[Mapping[str, float]]) -> StepMetrics:
    """Merge the metrics of a step's updates.

    Counts are summed; of minima and maxima the extreme is taken; all others are averaged.
    """
    values_by_name = group_pairs(item for row in rows for item in row.items())
    return {name: _reduction(name)(values) for name, values in values_by_name.items()}


def _reduction(name: str) -> Callable[[Sequence[float]], float]:
    """Return the function that merges the values of a metric, by the last part of its name."""
    last_part = name.rpartition("/")[2]
    if last_part in _SUMMED or last_part.endswith("_count"):
        return sum
    if last_part.endswith("_max"):
        return max
    if last_part.endswith("_min"):
        return min
    return fmean


def critic_metrics(metrics: Mapping[str, float]) -> StepMetrics:
    """Rename the metrics of a critic's update, and add the explained variance of returns.

    NAME becomes critic/NAME, and agent/AGENT/NAME becomes agent/AGENT/critic/NAME. The explained
    variance is left out where all returns are equal.
    """
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for path, value in metrics.items():
        prefix, _, name = path.rpartition("/")
        groups[prefix][name] = value

    renamed: StepMetrics = {}
    for prefix, group in groups.items():
        if "return_squared" in group:
            explained = explained_variance(group)
            if not math.isnan(explained):
                group["explained_variance"] = explained
        for name, value in group.items():
            renamed[f"{prefix}/critic/{name}" if prefix else f"critic/{name}"] = value
    return renamed


def mean_success(groups: Sequence[Group]) -> float:
    """Return the mean success of completed trajectories; NaN without any."""
    completed = _completed(groups)
    return fmean(trajectory.success for trajectory in completed) if completed else math.nan


def valid_turn_share(groups: Sequence[Group]) -> float:
    """Return the share of well-formed turns in completed trajectories; NaN without any."""
    turns = [turn for trajectory in _completed(groups) for turn in trajectory.turns]
    return fmean(turn.valid for turn in turns) if turns else math.nan


def describe_lost_trajectories(groups: Sequence[Group]) -> str:
    """Return a line on the trajectories that did not complete; "" if all did.

    Trajectories that were aborted because their group was full are not counted.
    """
    trajectories = all_trajectories(groups)
    lost = [trajectory for trajectory in trajectories if _is_lost(trajectory)]
    if not lost:
        return ""
    counts = Counter(trajectory.status.value for trajectory in lost)
    by_status = ", ".join(f"{count} {status}" for status, count in counts.items())
    return (
        f"{len(lost)} of {len(trajectories)} trajectories are lost ({by_status}); "
        f"the first, {lost[0].title}: {lost[0].error}"
    )


def describe_crashed_programs(groups: Sequence[Group]) -> str:
    """Return a line on agent programs that failed and count as wrong answers; "" if there are none."""
    trajectories = all_trajectories(groups)
    crashes = []
    for trajectory in trajectories:
        for event in trajectory.tools:
            if event.tool == CRASH_EVENT and event.failed:
                crashes.append(f"{trajectory.title}: {event.result}")
    if not crashes:
        return ""
    return (
        f"{len(crashes)} of {len(trajectories)} programs failed after an answered call and count as "
        f"wrong (orchestra.options.rules.crash); the first, {crashes[0]}"
    )


def _is_lost(trajectory: Trajectory) -> bool:
    if trajectory.status is Status.ABORTED:
        return "late/batch" in trajectory.metrics  # else its group was full
    return trajectory.status is not Status.COMPLETED


def _completed(groups: Sequence[Group]) -> list[Trajectory]:
    return [
        trajectory
        for trajectory in all_trajectories(groups)
        if trajectory.status is Status.COMPLETED
    ]


def all_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the trajectories of all groups, in order."""
    return [trajectory for group in groups for trajectory in group.trajectories]
