"""Scores of a team on tasks, for validation and evaluation alike: k trajectories a task, avg@k, pass@k and maj@k.

What is played is kept in files of a fixed size, from which an evaluation that was ended goes on.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from mcore_mas.equations.statistics import majority_score, mean_interval, pass_at
from mcore_mas.runtime.full_disk import retry_while_full
from rollout.base.async_tasks import gather_or_cancel
from rollout.base.json_files import read_json, write_json
from rollout.records.files import read_scores, write_trajectories
from rollout.records.trajectory import Task, Trajectory
from rollout.teams.collect import Collector


@dataclass(frozen=True, slots=True)
class Reply:
    """What is kept of one trajectory of a team."""

    score: float | None  # None: unknown, because something failed that says nothing of the team
    answer: str | None
    trouble: str  # see `Trajectory.trouble`
    cut: bool  # part of a prompt was left out
    valid: int  # well-formed turns ...
    turns: int  # ... of so many
    error: str = ""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        """What a trajectory says."""
        turns = trajectory.turns
        return cls(
            trajectory.score,
            trajectory.answer,
            trajectory.trouble,
            any("cut" in turn.scores for turn in turns),
            sum(turn.valid for turn in turns),
            len(turns),
            f"{trajectory.id}: {trajectory.error}" if trajectory.error else "",
        )


class Scoreboard:
    """The scores of `k` replies to each of some tasks, as they come in.

    A task counts whatever becomes of single replies. One whose prompt was too long is wrong. One that failed otherwise
    is unknown: it is played again, and what fails every time is left out of its task's mean and counted beside it.
    """

    def __init__(self, tasks: Sequence[Task], k: int) -> None:
        self.k = k
        self._tasks = tuple(tasks)
        self._replies: dict[tuple[str, int], Reply] = {}  # by task and sample

    def add(self, trajectory: Trajectory) -> None:
        """Count a trajectory, in place of an earlier one of the same task and sample; none beyond the first `k`."""
        if trajectory.sample < self.k:
            self._replies[trajectory.task_id, trajectory.sample] = Reply.of(trajectory)

    def missing(self) -> list[tuple[Task, int]]:
        """The tasks and samples of which nothing is known."""
        known = {place for place, reply in self._replies.items() if reply.score is not None}
        wanted = itertools.product(self._tasks, range(self.k))
        return [(task, sample) for task, sample in wanted if (task.id, sample) not in known]

    @property
    def replies(self) -> int:
        """How many are wanted."""
        return len(self._tasks) * self.k

    @property
    def lost(self) -> list[Reply]:
        """What has failed, and says nothing."""
        return [reply for reply in self._replies.values() if reply.score is None]

    def losses(self) -> str:
        """One line on what has failed, or "": how many, why, and the first one's error."""
        if not self.lost:
            return ""
        why = ", ".join(f"{n} {trouble}" for trouble, n in self.counts()["failed"].items())
        return f"{len(self.lost)} of {self.replies} trajectories are lost ({why}); the first, {self.lost[0].error}"

    def counts(self) -> dict[str, Any]:
        """Of the replies: how many there are, counted as wrong because too long, cut to fit, and failed by reason."""
        replies = self._replies.values()
        return {
            "replies": self.replies,
            "overlong": sum(reply.trouble == "overlong" for reply in replies),
            "cut": sum(reply.cut for reply in replies),
            "failed": dict(sorted(Counter(reply.trouble for reply in self.lost).items())),
        }

    def tasks(self) -> list[dict[str, Any]]:
        """Each task with its scores, null where unknown, and its metrics; none where no reply is known."""
        found = []
        sources = {task.id: task.source for task in self._tasks}
        voting = {
            sources[task] for (task, _), reply in self._replies.items() if reply.answer is not None
        }
        for task in self._tasks:
            replies = [self._replies.get((task.id, sample)) for sample in range(self.k)]
            known = [reply for reply in replies if reply is not None and reply.score is not None]
            scores = [None if reply is None else reply.score for reply in replies]
            metrics = _metrics(known, self.k, voting=task.source in voting) if known else {}
            found.append(
                {"task_id": task.id, "source": task.source, "scores": scores, "metrics": metrics}
            )
        return found

    def metrics(self) -> dict[str, float]:
        """As a step's metrics: the accuracy, by data source too where there are several, and what it is without."""
        counts = self.counts()
        found = {"failed": float(len(self.lost))}
        found |= {name: float(counts[name]) for name in ("overlong", "cut") if counts[name]}
        known = [task for task in self.tasks() if task["metrics"]]
        if not known:
            return found
        over_all = [task["metrics"][f"avg@{self.k}"] for task in known]
        sources = dict.fromkeys(task["source"] for task in known)
        for source in sources if len(sources) > 1 else ():
            own = [
                value
                for value, task in zip(over_all, known, strict=True)
                if task["source"] == source
            ]
            found[f"{source}/accuracy"] = fmean(own)
        low, high = mean_interval(over_all, "accuracy")
        replies = [reply for reply in self._replies.values() if reply.score is not None]
        valid_ratio = sum(reply.valid for reply in replies) / max(
            1, sum(reply.turns for reply in replies)
        )
        return found | {
            "accuracy": fmean(over_all),
            "ci_low": low,
            "ci_high": high,
            "valid_ratio": valid_ratio,
        }


def _metrics(replies: Sequence[Reply], k: int, *, voting: bool) -> dict[str, float]:
    """The metrics of a task's known replies; of fewer than k, those of so many. `voting`: its source has answers."""
    scores = [reply.score or 0.0 for reply in replies]
    metrics = {f"avg@{k}": fmean(scores), f"pass@{k}": pass_at(scores, min(k, len(scores)))}
    if voting:  # also where no reply has one, or a task of overlong prompts would be in no mean
        metrics[f"maj@{k}"] = majority_score([reply.answer for reply in replies], scores)
    return metrics


def score_rows(tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means of `Scoreboard.tasks` by data source, and over `all` of several, with 95 % intervals over tasks."""
    sources = sorted({task["source"] for task in tasks})
    rows = []
    for dataset in [*sources, "all"] if len(sources) > 1 else sources:
        own = [task["metrics"] for task in tasks if dataset in ("all", task["source"])]
        for metric in dict.fromkeys(name for metrics in own for name in metrics):
            values = [metrics[metric] for metrics in own if metric in metrics]
            low, high = mean_interval(values, f"{dataset}/{metric}")
            row = {"dataset": dataset, "metric": metric, "value": fmean(values)}
            rows.append(row | {"ci_low": low, "ci_high": high, "n": len(values)})
    return rows


async def measure(
    board: Scoreboard,
    collector: Collector,
    *,
    in_flight: int,
    retries: int,
    keep: Callable[[Trajectory], Awaitable[None]] | None = None,
) -> None:
    """Play what `board` lacks, at most `in_flight` trajectories at a time, and up to `retries` times what failed.

    It is played again with its own seeds. With others a short reply would stand in for a long one that was late, and
    the score would be that of the shorter replies.

    Args:
        keep: told of each trajectory as it ends; no further one begins in its place until it returns.

    Raises:
        Exception: as `Collector.play` and `keep`.
    """

    async def work(jobs: Iterator[tuple[Task, int]]) -> None:
        for task, sample in jobs:
            trajectory = await collector.play(task, sample)
            board.add(trajectory)
            if keep is not None:
                await keep(trajectory)

    for _ in range(retries + 1):
        missing = board.missing()
        jobs = iter(missing)  # shared: whoever is done takes the next
        await gather_or_cancel(work(jobs) for _ in range(min(in_flight, len(missing))))


_SIZE = 128  # trajectories of a file


class Shards:
    """A folder of trajectories, of which no more than those of one file are in memory."""

    def __init__(self, folder: Path, identity: str) -> None:
        """Go on with the files in `folder` if they are of the same `identity`; else remove them."""
        self._folder, said = folder, folder / "identity.json"
        try:
            same = read_json(said) == {"identity": identity}
        except (
            FileNotFoundError,
            ValueError,
        ):  # damaged; what cannot be read at the moment removes nothing
            same = False
        if not same:
            for file in folder.glob("part_*.parquet"):
                file.unlink()
            write_json(said, {"identity": identity})
        # several may be under way when a process is killed, and a later one is there without an earlier one
        self._earlier = sorted(folder.glob("part_*.parquet"))
        self._next_number = (
            int(self._earlier[-1].stem.removeprefix("part_")) + 1 if self._earlier else 0
        )
        self._waiting: list[Trajectory] = []

    def read(self) -> Iterator[Trajectory]:
        """What earlier starts have played, file by file, without what was read and said."""
        for file in self._earlier:
            yield from read_scores(file)

    async def keep(self, trajectory: Trajectory) -> None:
        """Take a trajectory; with the last of a file, write it."""
        self._waiting.append(trajectory)
        if len(self._waiting) == _SIZE:
            path, taken = self._next()
            await retry_while_full(lambda: asyncio.to_thread(write_trajectories, path, taken), path)

    def flush(self) -> None:
        """Write what has not filled a file."""
        if self._waiting:
            write_trajectories(*self._next())

    def _next(self) -> tuple[Path, list[Trajectory]]:
        taken, self._waiting = self._waiting, []
        path = self._folder / f"part_{self._next_number:06d}.parquet"
        self._next_number += 1
        return path, taken
