"""`python -m docs.writers NAME` writes generated pages: those of docs/, the README's results, the editors' schemas."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from mcore_mas.reports.paper_tables import TableError
from mcore_mas.reports.step_metrics import MetricsError
from rollout.base.files import write_text


@dataclass(frozen=True)
class Writer:
    """A module whose function `pages` returns texts by file."""

    module: str
    description: str


WRITERS = {
    "api": Writer("docs.writers.api", "docs/api.md: the Python API"),
    "catalogue": Writer("docs.writers.catalogue", "docs/catalogue.md: all teams"),
    "correctness": Writer("tests.correctness", "docs/correctness.md: equations, sources, tests"),
    "curves": Writer(
        "docs.writers.curves", "docs/pictures/demo.svg: the demo's curves, from results/demo_* ..."
    ),
    "experiments": Writer("docs.writers.experiments", "docs/experiments.md: the published runs"),
    "faults": Writer("tests.faults.page", "docs/faults.md: every fault, its test and its result"),
    "options": Writer(
        "docs.writers.options", "docs/options.md, and configs/schema/ for editors: all options"
    ),
    "results": Writer(
        "docs.writers.results", "the README's results, from results/tables/{suite}.csv ..."
    ),
    "settings": Writer("docs.writers.settings", "docs/settings.md: every key of a config"),
    "tables_tiny": Writer(
        "docs.writers.tables_tiny", "docs/tables_tiny.md: the papers' tables at the scale tiny"
    ),
}
# pages that are made with the site and are not committed
SITE = ("api", "catalogue", "correctness", "experiments", "faults", "options", "settings")


def main() -> None:
    """Write the pages of one writer, or all pages of the site."""
    descriptions = {name: writer.description for name, writer in WRITERS.items()}
    descriptions["site"] = f"all of {', '.join(SITE)}"
    parser = argparse.ArgumentParser(
        "python -m docs.writers",
        epilog="\n".join(f"  {name:<12} {text}" for name, text in descriptions.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=descriptions)
    parser.add_argument(
        "sources",
        nargs="*",
        type=Path,
        help="tables of scores for `results`, folders of runs for `curves`",
    )
    arguments = parser.parse_args()
    names = SITE if arguments.name == "site" else [arguments.name]
    try:
        for name in names:
            _write(name, arguments.sources)
    except (MetricsError, TableError) as error:
        sys.exit(f"error: {error}")


def _write(name: str, sources: list[Path]) -> None:
    pages: Callable[..., Mapping[Path, str]] = import_module(WRITERS[name].module).pages
    for file, text in pages(*sources).items():
        write_text(file, text)
        print(file)


if __name__ == "__main__":
    main()
