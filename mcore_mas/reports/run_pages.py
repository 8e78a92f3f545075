"""A suite's page of runs: what differs in their settings, how long each job took, and what their teams said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mcore_mas.reports.pages import drawing, framed, render_page, trajectory_page
from mcore_mas.reports.runs import config_differences
from mcore_mas.rollout.base.files import json_lines, write_text
from mcore_mas.rollout.records.files import read_tasks, read_trajectories
from mcore_mas.rollout.records.trajectory import Trajectory

_STAGES = ("prepare_tasks", "make_base_model", "bootstrap", "evaluate_base", "train", "evaluate_trained")
Said = tuple[str, Markup, Markup]  # what a conversation shows, its page, and its picture if it is of a game


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


_MOST_DRAWN, _ROW, _BETWEEN, _LETTER = 120, 30, 44, 7.2  # jobs; pixels


def draw_jobs(graph: Mapping[str, Sequence[str]]) -> str:
    """Jobs and those that each waits for as SVG, from the first at the left to the last; "" of too many to be read."""
    if len(graph) > _MOST_DRAWN:
        return ""

    @cache
    def column(job: str) -> int:
        return max((column(before) + 1 for before in graph[job]), default=0)

    width = _LETTER * max(map(len, graph)) + 16
    places: dict[str, tuple[float, int]] = {}
    high = 0
    for _, jobs in groupby(graph, lambda job: job.rpartition(": ")[0]):  # the rows of a run are its own
        rows: Counter[int] = Counter()
        for job in jobs:
            places[job] = (column(job) * (width + _BETWEEN) + 1, high + rows[column(job)] * _ROW + 1)
            rows[column(job)] += 1
        high += _ROW * max(rows.values())
    lines = []
    for job, (x, y) in places.items():
        for left, top in (places[before] for before in graph[job]):
            begin, end = f"{left + width:.0f} {top + 11}", f"{x:.0f} {y + 11}"
            bend = f"{left + width + _BETWEEN / 2:.0f} {top + 11} {x - _BETWEEN / 2:.0f} {y + 11}"
            lines.append(f'<path d="M{begin}C{bend} {end}" fill="none" stroke="#9a9a94"/>')
    for job, (x, y) in places.items():
        lines.append(
            f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="22" rx="4" fill="#f4f3ee" stroke="#9a9a94"/>'
        )
        lines.append(f'<text x="{x + 8:.0f}" y="{y + 15}" fill="#1c1c1a">{escape(job)}</text>')
    wide = max(x for x, _ in places.values()) + width + 1
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high}" style="max-width: {wide:.0f}px"'
    return f'{head} font-family="monospace" font-size="12" role="img">{"".join(lines)}</svg>'


def _seconds(folder: Path) -> dict[str, float]:
    """Of each job of a run that has ended, by its rule and state."""
    rows = {file.stem: json_lines(file)[0][-1:] for file in sorted((folder / "benchmarks").glob("*.jsonl"))}
    return {name: float(own[0]["s"]) for name, own in rows.items() if own}


def _said(folder: Path) -> Iterator[Said]:
    """Three conversations: of a task that only the trained team solves, before and after; and one that failed still."""
    base, trained = (_first_samples(folder / "evaluation" / state) for state in ("base", "trained"))
    tasks = {task.id: task for task in read_tasks(folder / "tasks" / "test.parquet")} if trained else {}
    gained = [name for name, own in trained.items() if own.success and name in base and not base[name].success]
    shown = next(iter(gained or trained), None)
    lost = next((own for own in trained.values() if own.score == 0), None)
    for what, played in (("before training", base.get(shown or "")), ("after training", trained.get(shown or ""))):
        if played is not None:
            yield _conversation(what, played, tasks)
    if lost is not None:
        yield _conversation("after training, not solved", lost, tasks)


def _first_samples(folder: Path) -> dict[str, Trajectory]:
    """The first trajectory of each task in the first file of an evaluation, by task; {} where there is none."""
    files = sorted(folder.glob("part_*.parquet"))
    played = read_trajectories(files[0]) if files else []
    return {one.task_id: one for one in reversed(played) if not one.error}


def _conversation(what: str, played: Trajectory, tasks: dict[str, Any]) -> Said:
    picture = drawing(tasks[played.task_id], played) if played.task_id in tasks else None
    return what, framed(trajectory_page(played, {})), Markup(picture or "")  # noqa: S704 `drawing` escapes its signs
