"""Runs of a results folder: where each stands, how two differ, who waits for whom in a step, and a suite's page."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from markupsafe import Markup

from mcore_mas.equations.statistics import mean_interval
from mcore_mas.reports.pages import drawing, framed, render_page, trajectory_page
from rollout.base.files import write_text
from rollout.base.json_files import read_json_lines, read_record
from rollout.base.nested import dotted_items
from rollout.base.ownership import FolderError
from rollout.base.yaml_files import read_yaml
from rollout.records.files import read_tasks, read_trajectories
from rollout.records.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands."""

    run: str
    steps: int  # taken ...
    of: int  # ... of so many
    done: bool
    reward: float | None  # of the last step that has one
    accuracy: float | None  # of the last validation
    scores: Mapping[str, float]  # avg@k of each evaluation, by state


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDifference:
    """A metric of two runs on the tasks that both have."""

    state: str
    metric: str
    first: float
    second: float
    low: float  # 95 % interval of second - first, paired by task
    high: float
    tasks: int


def runs_in(results: Path) -> list[Path]:
    """The folders of the runs of a results folder, by name.

    Raises:
        FolderError: there is no such folder.
    """
    if not results.is_dir():
        raise FolderError(f"{results}: no such folder; name the folder of the runs")
    return [file.parent for file in sorted(results.glob("*/config.yaml"))]


def run_states(results: Path) -> list[RunState]:
    """Where the runs of a results folder stand, or one run by its own folder; raises as `runs_in`."""
    return [
        _state(run)
        for run in ([results] if (results / "config.yaml").is_file() else runs_in(results))
    ]


def _state(run: Path) -> RunState:
    journal = run / "train" / "metrics.jsonl"
    rows = read_json_lines(journal)[0] if journal.is_file() else []
    scores = {
        file.stem: row["value"]
        for file in sorted((run / "evaluation").glob("*.json"))
        for row in read_record(file, "rows")["rows"]
        if row["metric"].startswith("avg@")  # of several data sources the last, `all`
    }
    return RunState(
        run=run.name,
        steps=1 + max((row["step"] for row in rows), default=-1),
        of=_config(run)["trainer"]["steps"],
        done=(run / "train" / "done.json").is_file(),
        reward=_last(rows, "reward/mean"),
        accuracy=_last(rows, "validation/accuracy"),
        scores=scores,
    )


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((row[name] for row in reversed(rows) if name in row), None)


def _config(run: Path) -> dict[str, Any]:
    file = run / "config.yaml"
    if not file.is_file():
        raise FolderError(
            f"{file}: no such file; expected a run's folder, such as results/demo_math"
        )
    return dict(read_yaml(file))


def config_differences(*runs: Path) -> dict[str, tuple[Any, ...]]:
    """The settings in which runs differ, by dotted key, with the value of each run, None where it has none.

    A run's own name, wherever it stands, is no setting, nor is a section that is empty in one run alone.

    Raises:
        FolderError: one is no run's folder.
    """
    flat = [dict(dotted_items(_config(run))) for run in runs]
    names = tuple(own["run"] for own in flat)
    values = {
        key: tuple(own.get(key) for own in flat)
        for own in flat
        for key, value in own.items()
        if value != {}
    }
    return {
        key: own
        for key, own in values.items()
        if own != names and any(value != own[0] for value in own)
    }


def score_differences(first: Path, second: Path) -> list[ScoreDifference]:
    """The metrics of evaluations that both runs have, on the tasks that both were asked.

    Raises:
        FolderError: an evaluation says nothing of its tasks.
    """
    found = []
    for file in sorted((first / "evaluation").glob("*.json")):
        other = second / "evaluation" / file.name
        if not other.is_file():
            continue
        tasks = [read_record(path, "tasks")["tasks"] for path in (file, other)]
        others = {task["task_id"]: task["metrics"] for task in tasks[1]}
        both = [
            (task["metrics"], others[task["task_id"]])
            for task in tasks[0]
            if task["task_id"] in others
        ]
        for metric in dict.fromkeys(name for own, _ in both for name in own):
            pairs = [
                (own[metric], theirs[metric])
                for own, theirs in both
                if metric in own and metric in theirs
            ]
            if not pairs:
                continue
            low, high = mean_interval([b - a for a, b in pairs], f"{file.stem}/{metric}")
            means = {"first": fmean(a for a, _ in pairs), "second": fmean(b for _, b in pairs)}
            row = ScoreDifference(
                state=file.stem, metric=metric, low=low, high=high, tasks=len(pairs), **means
            )
            found.append(row)
    return found


_STAGES = (
    "prepare_tasks",
    "make_base_model",
    "bootstrap",
    "evaluate_base",
    "train",
    "evaluate_trained",
)


def write_runs_page(results: Path, runs: Sequence[str], out: Path) -> None:
    """Write the page of the `runs` in the folder `results` to `out`.

    Raises:
        FolderError: one of them has no config.
    """
    folders = [results / run for run in runs]
    jobs = {run: _seconds(folder) for run, folder in zip(runs, folders, strict=True)}
    stages = dict.fromkeys([*_STAGES, *(name for own in jobs.values() for name in own)])
    page = render_page(
        "runs.html.jinja",
        runs=runs,
        jobs=jobs,
        stages=[stage for stage in stages if any(stage in own for own in jobs.values())],
        settings=config_differences(*folders),
        said={run: list(_said(folder)) for run, folder in zip(runs, folders, strict=True)},
    )
    write_text(out, page)


def _seconds(folder: Path) -> dict[str, float]:
    """Of each job of a run that has ended, by its rule and state."""
    rows = {
        file.stem: read_json_lines(file)[0][-1:]
        for file in sorted((folder / "benchmarks").glob("*.jsonl"))
    }
    return {name: float(own[0]["s"]) for name, own in rows.items() if own}


def _said(folder: Path) -> Iterator[tuple[str, Markup, Markup]]:
    """(What it shows, its page, its picture if it is of a game) of three conversations, without those that are not.

    Of a task that only the trained team solves, before and after; and one that failed still.
    """
    base, trained = (_first_samples(folder / "evaluation" / state) for state in ("base", "trained"))
    tasks = (
        {task.id: task for task in read_tasks(folder / "tasks" / "test.parquet")} if trained else {}
    )
    gained = [
        name
        for name, own in trained.items()
        if own.success and name in base and not base[name].success
    ]
    shown = next(iter(gained or trained), None)
    lost = next((own for own in trained.values() if own.score == 0), None)
    both = [
        ("before training", base.get(shown or "")),
        ("after training", trained.get(shown or "")),
    ]
    for what, played in [*both, ("after training, not solved", lost)]:
        if played is not None:
            picture = drawing(tasks[played.task_id], played) if played.task_id in tasks else None
            yield what, framed(trajectory_page(played, {})), Markup(picture or "")  # noqa: S704 `drawing` escapes its signs


def _first_samples(folder: Path) -> dict[str, Trajectory]:
    """The first trajectory of each task in the first file of an evaluation, by task; {} where there is none."""
    files = sorted(folder.glob("part_*.parquet"))
    played = read_trajectories(files[0]) if files else []
    return {one.task_id: one for one in reversed(played) if not one.error}


_MOMENTS = 60
_WAITING = "done, waiting for the slowest"


def who_works(played: Sequence[Trajectory]) -> dict[str, Any]:
    """For how many trajectories each agent and tool is at work, and how many are done while others are not.

    Returns:
        {} where no times are recorded; else `seconds` of all, `lines` (by who: a list of [second, number]), and of the
        `slowest` trajectory its index, its `task` and by how many seconds it was `behind` half of them.
    """
    spans: list[tuple[str, float, float]] = []
    ends: dict[int, float] = {}
    for index, one in enumerate(played):
        calls = [(turn.agent, turn.started_s, turn.took_s) for turn in one.turns]
        calls += [(f"tool {event.tool}", event.started_s, event.took_s) for event in one.tools]
        own = [(who, started, started + took) for who, started, took in calls if started]
        spans += own
        ends |= {index: max(end for *_, end in own)} if own else {}
    if not spans:
        return {}
    began, ended = min(start for _, start, _ in spans), max(ends.values())
    spans += [(_WAITING, end, ended) for end in ends.values()]
    width = max((ended - began) / _MOMENTS, 1e-6)
    lines: dict[str, list[float]] = defaultdict(lambda: [0.0] * _MOMENTS)
    for who, *times in spans:
        first, last = ((at - began) / width for at in times)
        for moment in range(int(first), min(_MOMENTS - 1, int(last)) + 1):
            lines[who][moment] += max(0.0, min(last, moment + 1) - max(first, moment))
    slowest = max(ends, key=ends.__getitem__)
    return {
        "seconds": ended - began,
        "lines": {
            who: [[(n + 0.5) * width, number] for n, number in enumerate(own)]
            for who, own in lines.items()
        },
        "slowest": slowest,
        "task": played[slowest].task_id,
        "behind": ended - median(ends.values()),
    }
