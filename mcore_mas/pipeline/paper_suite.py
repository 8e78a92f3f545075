"""Suites of papers' tables: the runs behind `snakemake table_drmas_1`, and the rule that makes the table."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_mas import code_commit
from mcore_mas.pipeline.check import problems
from mcore_mas.pipeline.sources import acquirable, describe_paths, known_sources
from mcore_mas.pipeline.suite import Suite
from mcore_mas.pipeline.suite_file import SuiteError
from mcore_mas.reports.paper_tables import PaperTable, TableError, table_names
from rollout.base.json_files import write_json
from rollout.base.yaml_files import read_yaml
from rollout.records.grouping import group_pairs

ALL_TABLES = "tables"  # the target of every table
ACQUIRE = "acquire"  # that of all inputs; acquire_NAME those of a table


def asked_tables(
    arguments: Sequence[str], configured: str | None, *, own_suite: bool = False
) -> list[str]:
    """The tables that a command line of Snakemake asks for, or that its config names, as it does in a submitted job.

    Without a suite of one's own, all inputs are those of every table.

    Raises:
        SuiteError: there is no such table.
    """
    if configured:
        return configured.split("+")
    known = table_names()
    asked = [
        word.partition("_")[2]
        for word in arguments
        if re.fullmatch(rf"(table|bundle|{ACQUIRE})_\w+", word)
    ]
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise SuiteError(
            f"no target table_{unknown[0]}; expected {', '.join(f'table_{name}' for name in known)}"
        )
    every = ALL_TABLES in arguments or (ACQUIRE in arguments and not own_suite)
    return known if every else list(dict.fromkeys(asked))


def asks_inputs(arguments: Sequence[str]) -> bool:
    """Whether a command line of Snakemake asks to acquire inputs."""
    return any(re.fullmatch(rf"{ACQUIRE}(_\w+)?", word) for word in arguments)


def paper_suite(tables: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The suite of all runs that `tables` are made of, each once; `config` may set scale, results and seeds.

    Raises:
        SuiteError: a table's file cannot be used, or `config` has another key.
    """
    unknown = config.keys() - {"scale", "results", "seeds", "gpus", ALL_TABLES}
    if unknown:
        raise SuiteError(
            f"a table brings its own suite: leave --configfile and --config {min(unknown)}=... out; it takes "
            "scale=paper or tiny, seeds=3, results=folder and gpus=8xH100"
        )
    try:
        loaded = [PaperTable.load(name) for name in tables]
    except TableError as error:
        raise SuiteError(str(error)) from error
    scale, seeds = str(config.get("scale", "paper")), seeds_of(config)
    # experiment -> tables that it is in
    names = group_pairs(
        (run, table) for table, own in zip(tables, loaded, strict=True) for run in own.experiments
    )
    cells = {run: own for table in loaded for run, own in table.evaluate.items()}
    return {
        "suite": f"table_{tables[0]}" if len(tables) == 1 else ALL_TABLES,
        "results": str(
            config.get("results", "results" if scale == "paper" else f"results/{scale}")
        ),
        "scale": scale,
        "experiments": {
            seeded(name, seed): [
                f"experiment={name}",
                f"+tracking.tags.table='{' '.join(own)}'",
                *([f"seed={seed}"] if seed != seeds[0] else []),
            ]
            for name, own in names.items()
            for seed in seeds
        },
        # at the scale `tiny` nothing is placed
        "overrides": [f"cluster.gpus={config['gpus']}"]
        if config.get("gpus") and scale == "paper"
        else [],
        "evaluate": {
            seeded(run, seed): {cell: _reseeded(seats, seed) for cell, seats in own.items()}
            for run, own in cells.items()
            for seed in seeds
        },
    }


def inputs(suite: Suite) -> dict[str, list[str]]:
    """The published files and models that a suite's runs read, each with these runs; none at the scale `tiny`."""
    needed: dict[str, list[str]] = {}
    for run in suite.runs if suite.scale == "paper" else ():
        published = [] if suite.indexes(run) else [suite.index(run)]
        for path in (
            *suite.data_files(run),
            *suite.data_folders(run),
            *suite.models(run),
            *filter(None, published),
        ):
            needed.setdefault(path.removesuffix("/config.json"), []).append(run)
    return needed


def check_there(suite: Suite) -> None:
    """Refuse a suite whose published data or models are not on this machine; the scale `tiny` makes its own.

    Raises:
        SuiteError: what is missing, which runs need it, where it comes from and what to do, a line each; and what else
            this machine lacks.
    """
    needed = inputs(suite)
    missing = {path: runs for path, runs in needed.items() if not Path(path).exists()}
    if not missing:
        return
    behind = {
        path: f" (for {runs[0]}{f' and {len(runs) - 1} more' if len(runs) > 1 else ''})"
        for path, runs in missing.items()
    }
    target = (
        f"{ACQUIRE}_{suite.name.removeprefix('table_')}" if suite.name != ALL_TABLES else ACQUIRE
    )
    fetched, by_hand = acquirable(missing)
    besides = ", but for what is to be put there by hand" if by_hand else ""
    size = f"{sum(known_sources()[path].gb or 0 for path in fetched):.1f} GB where known"
    lines = [
        f"{len(missing)} of {len(needed)} inputs are not on this machine:",
        *describe_paths(missing, behind),
        *(f"  {line}" for line in problems(suite, files=False)),
        f"`snakemake {target}` fetches them{besides} ({size}; docs/tables.md), or try --config scale=tiny, which makes "
        "its own",
    ]
    raise SuiteError("\n".join(lines))


def seeds_of(config: Mapping[str, Any]) -> list[int]:
    """1 to `seeds`, a run of each experiment by number: the first has the experiment's own seed, another its number.

    Raises:
        SuiteError: it is no number above 0.
    """
    count = str(config.get("seeds", 1))
    if not count.isdecimal() or not int(count):
        raise SuiteError(f"seeds={count}; expected how many, 1 or more")
    return list(range(1, int(count) + 1))


def seeded(run: str, seed: int) -> str:
    """The name of a run with another seed than the first."""
    return run if seed == 1 else f"{run}_seed{seed}"


def _reseeded(seats: Mapping[str, Any], seed: int) -> dict[str, Any]:
    parts = {agent: str(source).partition("/") for agent, source in seats.items()}
    return {
        a: f"{seeded(run, seed)}/{of}" if slash else seats[a]
        for a, (run, slash, of) in parts.items()
    }


def table_inputs(table: PaperTable, suite: Suite, seeds: Sequence[int]) -> dict[str, list[str]]:
    """The files of a table's evaluations by `experiment/state`; untrained teams share theirs."""
    found = {}
    for experiment, state in table.evaluations:
        runs = [seeded(experiment, seed) for seed in seeds]
        owners = [suite.bases[run] if state == "base" else run for run in runs]
        found[f"{experiment}/{state}"] = [
            str(suite.config_path(owner).with_name("evaluation") / f"{state}.json")
            for owner in owners
        ]
    return found


def _commits(evaluated: Sequence[Path]) -> list[str]:
    """The commits that runs were trained and evaluated with; of this checkout where none is recorded."""
    made = [*evaluated, *{path.parent.parent / "train" / "done.json" for path in evaluated}]
    found = {
        json.loads(path.read_text(encoding="utf-8")).get("commit")
        for path in made
        if path.is_file()
    }
    return sorted(filter(None, found)) or [code_commit()]


def write_paper_table(
    name: str, evaluations: Mapping[str, Sequence[str]], out: Path, *, scale: str
) -> None:
    """Write a table as `out`, Markdown, beside it as CSV, and as JSON what both were made from.

    `evaluations` are a file of each seed by `experiment/state`.
    """
    from mcore_mas.reports.costs import run_costs  # with pandas, which no plan needs
    from mcore_mas.reports.paper_results import MadeFrom, known_deviations, make_paper_table

    table = PaperTable.load(name)
    files = {key: [Path(path) for path in paths] for key, paths in evaluations.items()}
    # a run once: its trained team's answers, or what else is in the table where those are not
    evaluated = sorted(
        (path for paths in files.values() for path in paths),
        key=lambda path: path.stem == "trained",
    )
    played = {path.parent.parent: path.stem for path in evaluated}
    made = MadeFrom(
        scale=scale,
        seeds=sorted({read_yaml(run / "config.yaml")["seed"] for run in played}),
        commit=", ".join(_commits(evaluated)),
        costs=[run_costs(run, state) for run, state in played.items()],
        deviations=known_deviations(table),
    )
    make_paper_table(table, files, made, out.with_suffix(".csv"), out)
    write_json(
        out.with_suffix(".json"), {"table": name, "evaluations": dict(evaluations), **asdict(made)}
    )
