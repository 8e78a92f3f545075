"""`python -m docs.writers NAME` writes pages of this repository: those of docs/, the README's results, the schemas."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from mcore_mas.reports.paper_tables import TableError
from rollout.base.files import write_text

WRITERS = {  # the module of each name, whose `pages` takes the sources and returns texts by file; what they are
    "api": "docs/api.md, the Python API",
    "catalogue": "docs/catalogue.md, all teams",
    "experiments": "the table of docs/experiments.md: what is published, and how our settings differ",
    "options": "docs/options.md, what every option takes, and configs/schema/, which tells editors the same",
    "results": "the README's results, of tables of scores: results/tables/{suite}.csv ...",
    "tables_tiny": "docs/tables_tiny.md, which papers' tables were made at the scale tiny, and one of them beside it",
}


def main() -> None:
    """Write what a name stands for."""
    told = "\n".join(f"  {name:<12} {about}" for name, about in WRITERS.items())
    parser = argparse.ArgumentParser(
        "python -m docs.writers", epilog=told, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=WRITERS)
    parser.add_argument("sources", nargs="*", type=Path, help="tables of scores, for `results`")
    asked = parser.parse_args()
    pages: Callable[..., Mapping[Path, str]] = import_module(f"docs.writers.{asked.name}").pages
    try:
        for file, text in pages(*asked.sources).items():
            write_text(file, text)
            print(file)
    except TableError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
