"""The table of docs/experiments.md: what is published, and how our settings differ, from docs/published.yaml."""

from __future__ import annotations

import re
from pathlib import Path

from docs.writers import DOCS
from mcore_mas.config.experiments import expand_braces, experiments
from mcore_mas.reports.paper_results import published_values, read_published

EXPERIMENTS = DOCS / "experiments.md"


def published_experiments() -> list[str]:
    """The experiments that a paper reports: all but the demonstrations."""
    return [name for name in experiments() if not name.startswith("demo_")]


def pages() -> dict[Path, str]:
    """The page with its table written anew."""
    lines = [
        "| experiment | reports | evidence | differences from the paper |",
        "|---|---|---|---|",
    ]
    for row in read_published()["rows"]:
        names = [name for name, _ in expand_braces(row["of"])]
        listed = dict.fromkeys(
            str(v) for name in names for v in published_values(name).values() if v.differs
        )
        text = "; ".join(filter(None, [row["besides"], *listed]))
        lines.append(f"| `{row['of']}` | {row['reports']} | {row['evidence']} | {text} |")
    page = EXPERIMENTS.read_text(encoding="utf-8")
    table = re.compile(r"^\| experiment \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
    return {EXPERIMENTS: table.sub(lambda _: "\n".join(lines), page)}
