"""Suites of papers' tables: the runs behind targets such as `snakemake table_drmas_1`.

The Snakefile calls these functions to choose the tables, make their suite, and check that their
published inputs exist. `write_paper_table` is the rule that makes a table.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_mas import code_commit
from mcore_mas.pipeline.check import suite_problems
from mcore_mas.pipeline.sources import describe_paths, load_sources, sort_by_acquisition
from mcore_mas.pipeline.suite import Suite
from mcore_mas.pipeline.suite_file import SuiteError
from mcore_mas.reports.paper_tables import PaperTable, TableError, table_names
from rollout.base.json_files import read_json, write_json
from rollout.base.yaml_files import read_yaml
from rollout.records.grouping import group_pairs

ALL_TABLES = "tables"  # target of all tables, and name of their suite
ACQUIRE = "acquire"  # target of all inputs; the inputs of a table are acquire_NAME

# Keys of Snakemake's --config that a suite of tables takes; the last one is set for submitted jobs.
_CONFIG_KEYS = ("scale", "results", "seeds", "gpus", ALL_TABLES)


def requested_tables(
    arguments: Sequence[str], configured: str | None, *, names_suite: bool = False
) -> list[str]:
    """Return the tables that a command line of Snakemake requests.

    Args:
        arguments: Snakemake's command line.
        configured: names joined by "+", which a submitted job has in its config, or None.
        names_suite: True if the user names a suite, so that the target `acquire` is about that suite
            and not about all tables.

    Raises:
        SuiteError: there is no such table.
    """
    if configured:
        return configured.split("+")

    all_names = table_names()
    requested = [
        word.partition("_")[2]
        for word in arguments
        if re.fullmatch(rf"(table|bundle|{ACQUIRE})_\w+", word)
    ]
    unknown = [name for name in requested if name not in all_names]
    if unknown:
        raise SuiteError(f"no table '{unknown[0]}'; tables: {', '.join(all_names)}")

    all_tables = ALL_TABLES in arguments or (ACQUIRE in arguments and not names_suite)
    return all_names if all_tables else list(dict.fromkeys(requested))


def requests_inputs(arguments: Sequence[str]) -> bool:
    """Return True if a command line of Snakemake has a target that acquires inputs."""
    return any(re.fullmatch(rf"{ACQUIRE}(_\w+)?", word) for word in arguments)


def paper_suite(tables: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the suite of all runs that tables need, each run once.

    Args:
        tables: names of the tables.
        config: settings of Snakemake's --config: scale, results, seeds and gpus.

    Raises:
        SuiteError: the file of a table cannot be used, or `config` has another key.
    """
    unknown = config.keys() - set(_CONFIG_KEYS)
    if unknown:
        raise SuiteError(
            f"a table brings its own suite: leave --configfile and --config {min(unknown)}=... out; "
            "it takes scale=paper or tiny, seeds=3, results=folder and gpus=8xH100"
        )
    try:
        loaded = {name: PaperTable.load(name) for name in tables}
    except TableError as error:
        raise SuiteError(str(error)) from error

    scale = str(config.get("scale", "paper"))
    seeds = read_seeds(config)
    results = "results" if scale == "paper" else f"results/{scale}"
    overrides = []
    if config.get("gpus") and scale == "paper":  # runs at the scale `tiny` are not placed on GPUs
        overrides.append(f"cluster.gpus={config['gpus']}")
    return {
        "suite": f"table_{tables[0]}" if len(tables) == 1 else ALL_TABLES,
        "results": str(config.get("results", results)),
        "scale": scale,
        "experiments": _experiments(loaded, seeds),
        "overrides": overrides,
        "evaluate": _cross_play(loaded.values(), seeds),
    }


def _experiments(tables: Mapping[str, PaperTable], seeds: Sequence[int]) -> dict[str, list[str]]:
    """Return the overrides of each run: one for each experiment of the tables and each seed."""
    tables_by_experiment = group_pairs(
        (experiment, name) for name, table in tables.items() for experiment in table.experiments
    )
    overrides = {}
    for experiment, names in tables_by_experiment.items():
        for seed in seeds:
            run_overrides = [
                f"experiment={experiment}",
                f"+tracking.tags.table='{' '.join(names)}'",
            ]
            if seed != seeds[0]:
                run_overrides.append(f"seed={seed}")
            overrides[seed_run(experiment, seed)] = run_overrides
    return overrides


def _cross_play(
    tables: Iterable[PaperTable], seeds: Sequence[int]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the evaluations of the tables in which other models play, for each seed."""
    evaluate: dict[str, dict[str, dict[str, Any]]] = {}
    for table in tables:
        for experiment, states in table.evaluate.items():
            for seed in seeds:
                seats_by_state = evaluate.setdefault(seed_run(experiment, seed), {})
                for state, seats in states.items():
                    seats_by_state[state] = _seats_of_seed(seats, seed)
    return evaluate


def _seats_of_seed(seats: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the seats of an evaluation, with the run of each `run/agent` replaced by its run `number`."""
    seeded = {}
    for agent, source in seats.items():
        seeded[agent] = source
        if isinstance(source, str) and "/" in source:
            run, _, source_agent = source.partition("/")
            seeded[agent] = f"{seed_run(run, number)}/{source_agent}"
    return seeded


def read_seeds(config: Mapping[str, Any]) -> list[int]:
    """Return the numbers 1 to `seeds` of Snakemake's config.

    Each experiment has a run for each number. The first run keeps the experiment's own seed; the
    others take their number as seed.

    Raises:
        SuiteError: `seeds` is not a positive integer.
    """
    count = str(config.get("seeds", 1))
    if not count.isdecimal() or not int(count):
        raise SuiteError(f"seeds={count}; expected the number of seeds, 1 or more")
    return list(range(1, int(count) + 1))


def seed_run(experiment: str, number: int) -> str:
    """Return the name of run 1, 2, ... of an experiment; run 1 has the name of the experiment."""
    return experiment if number == 1 else f"{experiment}_seed{number}"


def inputs(suite: Suite) -> dict[str, list[str]]:
    """Return the published files and models that a suite reads, each with the runs that need it.

    There are none at the scale `tiny`, which makes its own.
    """
    if suite.scale != "paper":
        return {}
    runs_by_path: dict[str, list[str]] = {}
    for run in suite.runs:
        paths = [*suite.data_files(run), *suite.data_folders(run), *suite.model_files(run)]
        index = suite.index_manifest(run)
        if index and not suite.builds_index(run):
            paths.append(index)
        for path in paths:
            runs_by_path.setdefault(path.removesuffix("/config.json"), []).append(run)
    return runs_by_path


def check_inputs_exist(suite: Suite) -> None:
    """Check that the published data and models of a suite exist on this machine.

    Raises:
        SuiteError: inputs are missing. A line for each names its runs and its source, and further
            lines name other problems of the suite and the target that downloads the inputs.
    """
    required = inputs(suite)
    missing = {path: runs for path, runs in required.items() if not Path(path).exists()}
    if not missing:
        return

    notes = {}
    for path, runs in missing.items():
        others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        notes[path] = f" (for {runs[0]}{others})"

    target = ACQUIRE
    if suite.name != ALL_TABLES:
        target = f"{ACQUIRE}_{suite.name.removeprefix('table_')}"
    sources = load_sources()
    acquisition = sort_by_acquisition(missing)
    gb = sum(sources[path].gb or 0 for path in acquisition.downloadable)
    except_by_hand = ", except those to be put in place by hand" if acquisition.by_hand else ""
    lines = [
        f"{len(missing)} of {len(required)} inputs are not on this machine:",
        *describe_paths(missing, notes),
        *(f"  {problem}" for problem in suite_problems(suite, check_files=False)),
        f"`snakemake {target}` fetches them{except_by_hand} ({gb:.1f} GB where known; "
        "docs/tables.md), or try --config scale=tiny, which makes its own",
    ]
    raise SuiteError("\n".join(lines))


def table_inputs(table: PaperTable, suite: Suite, seeds: Sequence[int]) -> dict[str, list[str]]:
    """Return the files of a table's evaluations, one for each seed, by `experiment/state`.

    Runs whose untrained teams are evaluated in the same way share one evaluation.
    """
    files = {}
    for experiment, state in table.evaluations:
        runs = [seed_run(experiment, seed) for seed in seeds]
        if state == "base":
            runs = [suite.base_evaluation_owner[run] for run in runs]
        files[f"{experiment}/{state}"] = [
            str(suite.config_path(run).with_name("evaluation") / f"{state}.json") for run in runs
        ]
    return files


def write_paper_table(
    name: str, evaluations: Mapping[str, Sequence[str]], out: Path, *, scale: str
) -> None:
    """Write a table as Markdown, and beside it as CSV and the inputs of both as JSON.

    Args:
        name: name of the table.
        evaluations: files of the evaluations, one for each seed, by `experiment/state`.
        out: the Markdown file.
        scale: "paper" or "tiny".
    """
    # These modules import pandas, which planning a table does not need.
    from mcore_mas.reports.costs import run_costs
    from mcore_mas.reports.paper_results import Provenance, make_paper_table
    from mcore_mas.reports.published_values import known_deviations

    table = PaperTable.load(name)
    files = {key: [Path(path) for path in paths] for key, paths in evaluations.items()}

    # The costs of a run are those of its trained team, or else of another of its evaluations. The
    # evaluation that comes last decides in `state_by_run`, so those of trained teams are sorted last.
    evaluated = sorted(
        (path for paths in files.values() for path in paths),
        key=lambda path: path.stem == "trained",
    )
    state_by_run = {path.parent.parent: path.stem for path in evaluated}
    provenance = Provenance(
        scale=scale,
        seeds=sorted({read_yaml(run / "config.yaml")["seed"] for run in state_by_run}),
        commit=", ".join(_commits(evaluated)),
        costs=[run_costs(run, state) for run, state in state_by_run.items()],
        deviations=known_deviations(table),
    )
    make_paper_table(table, files, provenance, out.with_suffix(".csv"), out)
    record = {"table": name, "evaluations": dict(evaluations), **asdict(provenance)}
    write_json(out.with_suffix(".json"), record)


def _commits(evaluations: Sequence[Path]) -> list[str]:
    """Return the commits that runs were trained and evaluated with, or that of this checkout."""
    trainings = {path.parent.parent / "train" / "done.json" for path in evaluations}
    commits = set()
    for path in (*evaluations, *trainings):
        if path.is_file():
            commit = read_json(path).get("commit")
            if commit:
                commits.add(commit)
    return sorted(commits) or [code_commit()]
