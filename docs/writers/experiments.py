"""Writer of docs/experiments.md: the published runs, and how our settings differ, from docs/published.yaml."""

from __future__ import annotations

from pathlib import Path

from docs.writers import DOCS, rendered
from mcore_mas.config.experiments import expand_braces, experiments
from mcore_mas.reports.published_values import published_values, read_published

EXPERIMENTS = DOCS / "experiments.md"


def published_experiments() -> list[str]:
    """Return the names of the experiments that a paper reports: all but the demonstrations."""
    return [name for name in experiments() if not name.startswith("demo_")]


def pages() -> dict[Path, str]:
    """Return the text of the page: a row for each group of published runs."""
    lines = [
        "| experiment | reports | evidence | differences from the paper |",
        "|---|---|---|---|",
    ]
    for row in read_published()["rows"]:
        differences = []
        for name, _ in expand_braces(row["experiments"]):
            for value in published_values(name).values():
                if value.differs:
                    differences.append(str(value))
        texts = [row["differences"], *dict.fromkeys(differences)]
        text = "; ".join(text for text in texts if text)
        lines.append(f"| `{row['experiments']}` | {row['reports']} | {row['evidence']} | {text} |")
    return {EXPERIMENTS: rendered("experiments", table="\n".join(lines))}
