"""Leaks between splits as a table in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcore_mas.config.run import RunConfig
from rollout.config.data import make_tasks
from rollout.records.trajectory import Task
from rollout.tasks.files import read_task_file
from rollout.tasks.leaks import Leak, Match, find_leaks

_SHOWN_CHARS = 60  # of a prompt
_SENSES = {
    "id": "the same id",
    "text": "the same text",
    "similar": "similar text",
    "tests": "scored on tests that are shown",
}


def splits_of(config: Path) -> dict[str, list[Task]]:
    """The splits of a run, by name.

    Raises:
        ConfigError: the resolved config cannot be used.
        RecordError: a data file cannot be read.
    """
    loaded = RunConfig.load(config)
    return make_tasks(loaded.data, loaded.seed)


def splits_in(files: Sequence[Path], format: str) -> dict[str, list[Task]]:
    """One split per file: named by the file, or by its path where two files have one name.

    Raises:
        RecordError: a file is not of that format.
        ValueError: a file is named twice.
    """
    names = Counter(file.name for file in files)
    splits: dict[str, list[Task]] = {}
    for file in files:
        name = file.name if names[file.name] == 1 else str(file)
        if name in splits:
            raise ValueError(f"{file} is named twice; name files that should have nothing in common")
        splits[name] = [task for _, task in read_task_file(file, format=format, split="train")]
    return splits


def report(
    splits: Mapping[str, Sequence[Task]], console: Console, *, words: int, threshold: float, examples: int
) -> bool:
    """Print what leaks with the first examples; returns whether something leaks beyond doubt."""
    leaks = find_leaks(splits, words=words, threshold=threshold)
    console.print(_table(leaks))
    for leak in leaks:
        if leak.matches and examples:
            console.print(Text(f"\n{_where(leak)}: {_SENSES[leak.kind]}", style="bold"))
            for match in leak.matches[:examples]:
                console.print(Text(_line(leak, match)), soft_wrap=True)
            if len(leak.matches) > examples:
                console.print(Text(f"and {len(leak.matches) - examples} more; --examples shows them", style="dim"))
    return any(leak.exact for leak in leaks)


def _table(leaks: Sequence[Leak]) -> Table:
    table = Table("splits", "leak")
    for heading in ("tasks", "of", "%"):
        table.add_column(heading, justify="right")
    for leak in leaks:
        found = len(leak.matches)
        share = f"{100 * found / leak.tasks:.1f}" if leak.tasks else "-"
        style = "red" if leak.exact else "yellow" if found else ""
        table.add_row(_where(leak), _SENSES[leak.kind], str(found), str(leak.tasks), share, style=style)
    return table


def _where(leak: Leak) -> str:
    return leak.split if leak.kind == "tests" else f"{leak.earlier} → {leak.split}"


def _line(leak: Leak, match: Match) -> str:
    prompt = " ".join(match.task.prompt.split())
    shown = prompt if len(prompt) <= _SHOWN_CHARS else f"{prompt[:_SHOWN_CHARS]}..."
    if leak.kind == "tests":
        return f"{match.task.id}: {shown}"
    alike = f", {match.similarity:.2f}" if leak.kind == "similar" else ""
    return f"{match.earlier.id} → {match.task.id}{alike}: {shown}"
