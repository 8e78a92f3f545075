"""Scores of a team on tasks, for validation and evaluation alike: avg@k, pass@k and maj@k.

`measure` plays each task k times and fills a `Scoreboard`.
"""

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from mcore_mas.equations.statistics import majority_score, pass_at, score_interval
from rollout.base.async_tasks import gather_or_cancel
from rollout.records.trajectory import Task, Trajectory
from rollout.teams.collect import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Result of a trajectory, as a scoreboard stores it.

    Attributes:
        score: score of the trajectory; None if it failed for a reason that says nothing about the
            team.
        answer: answer that votes in maj@k; None if the environment has no answers.
        failure_reason: see `Trajectory.failure_reason`; "" if the trajectory did not fail.
        cut: True if part of a prompt was left out because it was too long.
        valid_turns: number of well-formed turns.
        turns: number of all turns.
        error: title and error of a trajectory that failed, such as "sample 2 of task train-31: ...";
            "" if it did not fail.
    """

    score: float | None
    answer: str | None
    failure_reason: str
    cut: bool
    valid_turns: int
    turns: int
    error: str = ""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        """Return the scoreboard's entry for a trajectory."""
        turns = trajectory.turns
        return cls(
            score=trajectory.score,
            answer=trajectory.answer,
            failure_reason=trajectory.failure_reason,
            cut=any("cut" in turn.scores for turn in turns),
            valid_turns=sum(turn.valid for turn in turns),
            turns=len(turns),
            error=f"{trajectory.title}: {trajectory.error}" if trajectory.error else "",
        )


class Scoreboard:
    """Scores of `k` replies to each of some tasks, while they come in.

    A reply is the result of one trajectory of the team.

    Every task counts, even if some of its replies fail. A reply whose prompt was too long is wrong.
    A reply that failed for another reason has no score: it is played again, and if it fails every
    time, it is left out of the mean of its task and reported separately.
    """

    def __init__(self, tasks: Sequence[Task], k: int) -> None:
        self.k = k
        self._tasks = tuple(tasks)
        self._replies: dict[tuple[str, int], Reply] = {}  # by task id and sample

    def add(self, trajectory: Trajectory) -> None:
        """Count a trajectory; it replaces an earlier one of the same task and sample.

        Samples beyond the first `k` are ignored.
        """
        if trajectory.sample < self.k:
            self._replies[trajectory.task_id, trajectory.sample] = Reply.of(trajectory)

    def missing(self) -> list[tuple[Task, int]]:
        """Return the tasks and samples without a score."""
        scored = {key for key, reply in self._replies.items() if reply.score is not None}
        expected = itertools.product(self._tasks, range(self.k))
        return [(task, sample) for task, sample in expected if (task.id, sample) not in scored]

    @property
    def expected_replies(self) -> int:
        """Number of replies that a complete scoreboard has."""
        return len(self._tasks) * self.k

    @property
    def lost(self) -> list[Reply]:
        """Replies that failed, and have no score."""
        return [reply for reply in self._replies.values() if reply.score is None]

    @property
    def quarantined(self) -> list[tuple[str, int]]:
        """Task ids and samples of the replies that were lost by a defect in the user's code."""
        return [
            key for key, reply in self._replies.items() if reply.failure_reason == "quarantined"
        ]

    def describe_losses(self) -> str:
        """Return a line about the lost trajectories: number, reasons and first error; "" if none is lost."""
        if not self.lost:
            return ""
        reasons = ", ".join(f"{count} {name}" for name, count in self.counts()["failed"].items())
        return (
            f"{len(self.lost)} of {self.expected_replies} trajectories are lost ({reasons}); "
            f"the first, {self.lost[0].error}"
        )

    def counts(self) -> dict[str, Any]:
        """Return the numbers of replies that are expected, overlong, cut, and failed by reason.

        Overlong replies, in which a prompt was too long, count as wrong and are not among the failed
        ones. Cut ones were played with a prompt of which a part was left out.
        """
        replies = self._replies.values()
        return {
            "replies": self.expected_replies,
            "overlong": sum(reply.failure_reason == "overlong" for reply in replies),
            "cut": sum(reply.cut for reply in replies),
            "failed": dict(sorted(Counter(reply.failure_reason for reply in self.lost).items())),
        }

    def task_rows(self) -> list[dict[str, Any]]:
        """Return a row for each task, with the scores of its replies and its metrics.

        A score is None if the reply has none; the metrics are {} if all scores are None.
        """
        sources_with_answers = self._sources_with_answers()
        rows = []
        for task in self._tasks:
            replies = [self._replies.get((task.id, sample)) for sample in range(self.k)]
            scored = [reply for reply in replies if reply is not None and reply.score is not None]
            metrics: dict[str, float] = {}
            if scored:
                has_vote = task.source in sources_with_answers
                metrics = _task_metrics(scored, self.k, has_vote=has_vote)
            scores = [None if reply is None else reply.score for reply in replies]
            rows.append(
                {"task_id": task.id, "source": task.source, "scores": scores, "metrics": metrics}
            )
        return rows

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a training step's validation.

        They are the accuracy with its 95 % interval; the accuracy of each data source, if there are
        several; the share of well-formed turns; and the numbers of failed, overlong and cut replies.
        """
        counts = self.counts()
        metrics = {"failed": float(len(self.lost))}
        for name in ("overlong", "cut"):
            if counts[name]:
                metrics[name] = float(counts[name])

        accuracies: list[float] = []
        by_source: dict[str, list[float]] = {}
        for row in self.task_rows():
            if row["metrics"]:
                accuracy = row["metrics"][f"avg@{self.k}"]
                accuracies.append(accuracy)
                by_source.setdefault(row["source"], []).append(accuracy)
        if not accuracies:
            return metrics

        if len(by_source) > 1:
            for source, source_accuracies in by_source.items():
                metrics[f"{source}/accuracy"] = fmean(source_accuracies)
        low, high = score_interval(accuracies, "accuracy")
        metrics["accuracy"] = fmean(accuracies)
        metrics["ci_low"] = low
        metrics["ci_high"] = high

        scored = [reply for reply in self._replies.values() if reply.score is not None]
        turns = sum(reply.turns for reply in scored)
        metrics["valid_ratio"] = sum(reply.valid_turns for reply in scored) / max(1, turns)
        return metrics

    def _sources_with_answers(self) -> set[str]:
        """Return the data sources in which any reply has an answer."""
        source_of = {task.id: task.source for task in self._tasks}
        return {
            source_of[task_id]
            for (task_id, _), reply in self._replies.items()
            if reply.answer is not None
        }


def _task_metrics(replies: Sequence[Reply], k: int, *, has_vote: bool) -> dict[str, float]:
    """Return the metrics of a task.

    Args:
        replies: replies with scores: k of them, or fewer if some failed.
        k: number in the names of the metrics.
        has_vote: the task's data source has answers that can vote. The vote of a task without any
            answer, such as one whose prompt is too long, is then wrong instead of left out.
    """
    scores = [reply.score or 0.0 for reply in replies]
    metrics = {f"avg@{k}": fmean(scores), f"pass@{k}": pass_at(scores, min(k, len(scores)))}
    if has_vote:
        metrics[f"maj@{k}"] = majority_score([reply.answer for reply in replies], scores)
    return metrics


def score_rows(task_rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean of each metric by data source, with a 95 % interval over tasks.

    Args:
        task_rows: rows that `Scoreboard.task_rows` returned.

    Returns:
        Rows of each data source; if there are several, the last rows are those of all tasks, with the
        dataset "all". `n` is the number of tasks that have the metric.
    """
    datasets = sorted({row["source"] for row in task_rows})
    if len(datasets) > 1:
        datasets.append("all")
    rows = []
    for dataset in datasets:
        task_metrics = [row["metrics"] for row in task_rows if dataset in ("all", row["source"])]
        names = dict.fromkeys(itertools.chain.from_iterable(task_metrics))
        for metric in names:
            values = [metrics[metric] for metrics in task_metrics if metric in metrics]
            low, high = score_interval(values, f"{dataset}/{metric}")
            rows.append(
                {
                    "dataset": dataset,
                    "metric": metric,
                    "value": fmean(values),
                    "ci_low": low,
                    "ci_high": high,
                    "n": len(values),
                }
            )
    return rows


def describe_scores(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each row of `score_rows`: data source, metric, mean and interval in percent."""
    return [
        f"{row['dataset']}  {row['metric']}: {100 * row['value']:.1f} % "
        f"[{100 * row['ci_low']:.1f}, {100 * row['ci_high']:.1f}]"
        for row in rows
    ]


async def measure(
    board: Scoreboard,
    collector: Collector,
    *,
    in_flight: int,
    retries: int,
    on_trajectory: Callable[[Trajectory], Awaitable[None]] | None = None,
) -> None:
    """Play the missing replies of a scoreboard, each until it does not fail or has no retry left.

    A failed reply is played again with the same seeds. With other seeds, replies that failed because they took
    too long would be replaced by shorter ones, and the scores would be those of short replies.

    Args:
        board: counts the trajectories.
        collector: plays them.
        in_flight: largest number of concurrent trajectories.
        retries: number of times that a failed reply is played again.
        on_trajectory: awaited after each trajectory, before another one begins in its place.

    Raises:
        Exception: raised by `Collector.play` or by `on_trajectory`.
    """

    async def work(jobs: Iterator[tuple[Task, int]]) -> None:
        for task, sample in jobs:
            trajectory = await collector.play(task, sample)
            board.add(trajectory)
            if on_trajectory is not None:
                await on_trajectory(trajectory)

    for _ in range(retries + 1):
        missing = board.missing()
        jobs = iter(missing)  # shared by all workers: each takes the next job when it is free
        await gather_or_cancel(work(jobs) for _ in range(min(in_flight, len(missing))))
