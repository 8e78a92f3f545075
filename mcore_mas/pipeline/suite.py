"""Suite of runs: what one call of the pipeline makes, checked and resolved before any job starts."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from mcore_mas import SHIPPED
from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import CONFIGS, experiments
from mcore_mas.config.run import STATES, ConfigError, RunConfig
from mcore_mas.pipeline import sharing, suite_file
from mcore_mas.pipeline.config_cache import ConfigCache
from mcore_mas.pipeline.suite_file import SuiteError
from mcore_mas.planning.gpus import Cluster, PlanError
from mcore_mas.planning.place import place_run
from rollout.base.errors import ModelError
from rollout.base.files import write_text
from rollout.base.text import nearest_hint
from rollout.base.yaml_files import read_yaml
from rollout.tasks.splits import SPLITS

SNAKEFILE = SHIPPED / "workflow" / "Snakefile"
Seats = Mapping[
    str, Mapping[str, Mapping[str, Any]]
]  # run -> evaluation beside base and trained -> seats by agent
_BY_SUITE = ("tables", "figures", "reports")  # folders of results whose files have a suite's name


class ReportError(RuntimeError):
    """Snakemake could not write its report; its own words are in the log above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The runs of a suite by name, each with its resolved config."""

    name: str
    runs: sharing.Runs
    # Experiment by run; runs that differ only in their seed are of one experiment.
    experiments: Mapping[str, str]
    overrides: Mapping[str, list[str]]  # Hydra overrides by run
    # By run, the run whose cold start its policies begin with. A run with models of its own has none.
    starts: Mapping[str, str]
    cells: Seats
    # By run, the first run whose untrained team is evaluated in the same way.
    bases: Mapping[str, str]
    # By run, the first run with the same tasks and, if it has one, the same index.
    tasks: Mapping[str, str]
    scale: str = "paper"  # or tiny
    folder: Path | None = None  # of the suite file
    configs: Path | None = None  # the user's configs, which take precedence over the shipped ones
    _checked: dict[str, RunConfig] = field(default_factory=dict, compare=False)

    @classmethod
    def load(
        cls, suite: Mapping[str, Any], folder: Path | None = None, cache: Path | None = None
    ) -> Self:
        """Check the content of a suite file in `folder` and compose the config of each of its runs.

        From then on Python code in `folder`, and beside its configs, is imported here and in processes started here.
        A file in the folder `cache` keeps what was composed; None composes everything.

        Raises:
            SuiteError: a key is unknown or of the wrong type, a folder is not there or cannot be written, or overrides
                do not compose: of each run that has another mistake than those before, a line.
        """
        suite_file.check_schema(suite)
        configs = suite_file.own_configs(suite, folder)
        code = [path.resolve() for path in (folder, configs and configs.parent) if path]
        suite_file.make_importable(*code)
        suite_file.check_writable(Path(suite.get("results", "results")))
        own = {**suite.get("experiments", {}), **suite_file.combinations(suite.get("grid"))}
        overrides = {run: [*items, *suite.get("overrides", [])] for run, items in own.items()}
        known = ConfigCache(cache / f"{suite['suite']}.json", configs, code) if cache else None
        runs: dict[str, dict[str, Any]] = {}
        wrong: dict[str, str] = {}  # by mistake
        for run, items in overrides.items():
            try:
                runs[run] = _composed(suite, run, items, configs, known)
            except SuiteError as error:
                wrong.setdefault(str(error.__cause__).removeprefix(f"run '{run}': "), str(error))
        if wrong:
            raise SuiteError("\n  ".join(wrong.values()))
        if known:
            known.save()
        started = {
            run: config for run, config in runs.items() if config.get("cold_start") is not None
        }
        starts = {run: run for run in started}
        if suite.get("share_cold_starts"):
            starts = sharing.stage_owners(started, "start")
            runs = {
                run: sharing.with_start_of(config, starts.get(run, run))
                for run, config in runs.items()
            }
        recipes = {
            run: [i for i in items if i.partition("=")[0] != "seed"]
            for run, items in overrides.items()
        }
        named, tagged = sharing.first_equal(recipes.items()), {}
        for run, config in runs.items():  # for MLflow's runs, beside their own
            tags = {
                "suite": suite["suite"],
                "experiment": named[run],
                **config["tracking"].get("tags", {}),
            }
            tagged[run] = {**config, "tracking": {**config["tracking"], "tags": tags}}
        return cls(
            name=suite["suite"],
            runs=tagged,
            experiments=named,
            overrides=overrides,
            starts=starts,
            cells=_cells(suite.get("evaluate", {}), runs),
            folder=folder,
            configs=configs,
            bases=sharing.stage_owners(runs, "score"),
            tasks=sharing.stage_owners(runs, "index"),
            scale=suite.get("scale", "paper"),
        )

    @property
    def states(self) -> list[str]:
        """The states in which any run is evaluated."""
        return list(
            dict.fromkeys([*STATES, *(cell for cells in self.cells.values() for cell in cells)])
        )

    @property
    def evaluations(self) -> list[str]:
        """Every evaluation, as `run/evaluation/state`."""
        return [
            f"{run}/evaluation/{state}"
            for run in self.runs
            for state in (*STATES, *self.cells.get(run, ()))
        ]

    def seats(self, run: str, state: str) -> Mapping[str, Any]:
        """Return the models of an evaluation by agent, empty if the run's own policies play."""
        return self.cells.get(run, {}).get(state, {})

    def trained_for(self, run: str, state: str) -> list[str]:
        """Return the runs whose trained policies play in an evaluation."""
        seats = self.seats(run, state)
        rest = (
            []
            if state == "base"
            else ["trained"] * any(agent not in seats for agent in self.runs[run]["agents"])
        )
        named = [
            source.partition("/")[0]
            for source in (*seats.values(), *rest)
            if isinstance(source, str)
        ]
        return list(
            dict.fromkeys(run if name == "trained" else name for name in named if name != "base")
        )

    @property
    def own_starts(self) -> str:
        """A regular expression of the runs that have a cold start of their own."""
        return _pattern([run for run, start in self.starts.items() if run == start])

    def indexes(self, run: str) -> bool:
        """Return True if a run builds an index, because no server or published index is named."""
        return self.index(run) == f"{self.runs[run]['results']}/{run}/index/index.json"

    def index(self, run: str) -> str | None:
        """Return the manifest of the index that a run's own server searches, or None."""
        retriever = self.runs[run].get("retriever")
        if retriever is None or retriever.get("urls"):
            return None
        folder = retriever.get("folder") or f"{self.runs[run]['results']}/{run}/index"
        return f"{folder}/index.json"

    def data_files(self, run: str) -> list[str]:
        """Return the data files from which the tasks and passages of a run are read."""
        passages = (self.runs[run].get("retriever") or {}).get("passages")
        return [*map(str, self.checked(run).data.paths), *([passages] if passages else [])]

    def data_folders(self, run: str) -> list[str]:
        """Return the folder that a run's generator reads, such as that of DSBench."""
        data = self.checked(run).data
        folder = (
            data.options.get("folder") if data.generator and ":" not in data.generator else None
        )
        return [folder] if isinstance(folder, str) else []

    def models(self, run: str) -> list[str]:
        """Return the config.json of the models and the encoder that a run needs and no rule makes."""
        encoder = (self.runs[run].get("retriever") or {}).get("encoder_folder")
        folders = [encoder] if encoder else []
        if run not in self.starts:
            folders += [
                policy["model"] for policy in self.runs[run]["policies"].values() if policy["model"]
            ]
        return [f"{folder}/config.json" for folder in dict.fromkeys(folders)]

    @property
    def tiny_files(self) -> dict[str, str]:
        """The files that the scale `tiny` makes, each with its format or "passages"."""
        found: dict[str, str] = {}
        for run in self.runs if self.scale == "tiny" else ():
            data = self.checked(run).data
            found |= dict.fromkeys(self.data_files(run), "passages")
            found |= {
                str(file.path): file.format or data.format
                for split in SPLITS
                for file in data.files(split)
            }
        return found

    def checked(self, run: str) -> RunConfig:
        """Return the validated config of a run."""
        if run not in self._checked:
            self._checked[run] = RunConfig.check(dict(self.runs[run]), f"run '{run}'")
        return self._checked[run]

    def config_path(self, run: str) -> Path:
        """Return the file of the resolved config of a run."""
        return Path(self.runs[run]["results"]) / run / "config.yaml"

    def write_configs(self, runs: Iterable[str | None]) -> None:
        """Write the resolved configs of `runs`, each complete or not at all."""
        for run in self.runs.keys() & set(runs):
            text = yaml.safe_dump(
                dict(self.runs[run]), sort_keys=False, allow_unicode=True, width=120
            )
            write_text(self.config_path(run), text)

    def made_folders(self, outputs: Iterable[str]) -> list[Path]:
        """What one pipeline at a time may make: the folders of `outputs`, and the suite's tables and report.

        So several suites run side by side where no run is in two of them.
        """
        results = Path(next(iter(self.runs.values()))["results"])
        paths = [Path(path) for path in outputs]
        inside = {
            results / path.relative_to(results).parts[0]
            for path in paths
            if path.is_relative_to(results)
        }
        outside = {path.parent for path in paths if not path.is_relative_to(results)}
        own = Path(".snakemake", "suites", self.name)
        return sorted((inside - {results / name for name in _BY_SUITE}) | outside | {own})

    def pattern(self, *, indexes: bool, shared: bool = False) -> str:
        """A regular expression of the runs that make their tasks and build an index, or that build none.

        With `shared` it is of those that take both from another run.
        """
        return _pattern(
            [
                run
                for run in self.runs
                if self.indexes(run) is indexes and (self.tasks[run] != run) is shared
            ]
        )


def _composed(
    suite: Mapping[str, Any],
    run: str,
    overrides: Sequence[str],
    configs: Path | None,
    cache: ConfigCache | None,
) -> dict[str, Any]:
    """The resolved config of a run, with its placement."""
    scale = suite.get("scale", "paper")
    settings = [*overrides, f"run={run}", f"results={suite.get('results', 'results')}"]

    def compose() -> dict[str, Any]:
        try:
            values = resolve(settings, configs, scale, sections={"run": run})
            gpus = values["cluster"]["gpus"]
            if scale != "paper" or gpus is None:
                return values
            config = RunConfig.check(values, f"run '{run}'")
            return place_run(config, Cluster.parse(gpus)).model_dump(mode="json")
        except (ConfigError, ModelError, PlanError) as error:
            where = f"run '{run}': "
            raise SuiteError(
                f"{where}{str(error).removeprefix(where)} ({' '.join(overrides)})"
            ) from error

    return cache.get({"overrides": settings, "scale": scale}, compose) if cache else compose()


def _cells(cells: Seats, runs: sharing.Runs) -> Seats:
    """The evaluations of a suite by run, in which all that is named is there."""
    for run, own in cells.items():
        if run not in runs:
            raise SuiteError(f"evaluate: no run '{run}'; runs: {', '.join(runs)}")
        for cell, seats in own.items():
            for agent, source in seats.items():
                _check_seat(f"evaluate.{run}.{cell}.{agent}", runs[run], agent, source, runs)
    return cells


def _check_seat(
    where: str, run: Mapping[str, Any], agent: str, source: Any, runs: Mapping[str, Any]
) -> None:
    if agent not in run["agents"]:
        raise SuiteError(f"{where}: no such agent; agents: {', '.join(run['agents'])}")
    if not isinstance(source, str) or source in STATES:
        return
    other, _, of = source.partition("/")
    if other not in runs:
        raise SuiteError(
            f"{where}: no run '{other}'; expected base, trained, a run ({', '.join(runs)}), run/agent, "
            "{model: folder} or {remote: ...}"
        )
    if (of or agent) not in runs[other]["agents"]:
        raise SuiteError(
            f"{where}: run '{other}' has no agent '{of or agent}'; {', '.join(runs[other]['agents'])}"
        )


def load_suite(suite: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Suite:
    """The suite of `suite_values`, with `overrides` of every run.

    Raises:
        SuiteError: there is neither, or the suite cannot be used.
    """
    path, values = Path(suite), suite_values(suite, config_dir)
    if not isinstance(values, dict):
        raise SuiteError(f"{path}: a suite is a mapping of keys (docs/configuration.md)")
    if overrides:
        values["overrides"] = [*values.get("overrides", []), *overrides]
    return Suite.load(values, path.parent.resolve() if path.is_file() else None)


def suite_values(suite: str, config_dir: Path | None = None) -> Any:
    """What is in a suite's file, or the suite of the experiment of that name alone.

    Own configs are in `config_dir`, whatever the file says; by name alone and without it, in `configs` of the current
    folder.

    Raises:
        SuiteError: there is neither, a file is no YAML, or `config_dir` is no folder.
    """
    path = Path(suite)
    configs = suite_file.own_configs({"config_dir": config_dir}, Path())
    own = {"config_dir": str(configs)} if configs and (config_dir or configs != CONFIGS) else {}
    try:
        if path.is_file():
            values = read_yaml(path)
            return {**values, **own} if config_dir and isinstance(values, dict) else values
        known = {**experiments(), **(experiments(configs) if configs else {})}
    except yaml.YAMLError as error:
        raise SuiteError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    if suite not in known:
        near = nearest_hint(suite, [*known, *map(str, Path().glob("*.yaml"))])
        raise SuiteError(
            f"{suite}: no such file, and no experiment of this name (`mcore-mas list experiments`){near}"
        )
    return {"suite": suite, "experiments": {suite: [f"experiment={suite}"]}, **own}


def _pattern(names: Sequence[str]) -> str:
    return "|".join(map(re.escape, names)) or "(?!)"  # (?!) matches no run


def make_report(suite: Mapping[str, Any], targets: Sequence[str], out: Path) -> None:
    """Write one HTML page `out` about the files `targets` and all jobs behind them.

    A second Snakemake reads what the running one recorded. It takes no lock, because the first holds it, and starts
    no job, because every target is an input of the rule that calls this.

    Raises:
        ReportError: Snakemake ended with an error.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".report-") as folder:
        suite_file, page = Path(folder) / "suite.yaml", Path(folder) / "report.html"
        suite_file.write_text(yaml.safe_dump(dict(suite), sort_keys=False), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            str(SNAKEFILE),
            "--configfile",
            str(suite_file),
        ]
        command += ["--workflow-profile", "none", "--nolock", "--cores", "1", "--report", str(page)]
        command += [
            "--report-stylesheet",
            str(SNAKEFILE.parent / "report/narrow.css"),
            "--",
            *targets,
        ]
        status = subprocess.run(command, check=False).returncode
        if status != 0 or not page.is_file():
            raise ReportError(f"{out}: snakemake --report ended with status {status}")
        page.replace(out)
