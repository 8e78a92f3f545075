"""Suite of runs: the runs of one call of the pipeline, with their resolved configs.

`Suite.load` checks a suite and composes the config of each of its runs before any job starts.
`load_suite` reads a suite file, or makes a suite of one experiment.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

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
from rollout.base.hints import nearest_hint
from rollout.base.yaml_files import read_yaml
from rollout.tasks.splits import SPLITS

# Evaluations in which other models than the run's own policies play some agents. Maps a run to the
# names of its evaluations, and each of these to the source of the model of each agent.
CrossPlay = Mapping[str, Mapping[str, Mapping[str, Any]]]

# Folders of results whose files are named after a suite, so that several suites may write there.
_SHARED_FOLDERS = ("tables", "figures", "reports")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The runs of a suite by name, each with its resolved config."""

    name: str
    runs: sharing.Runs
    # For each run, its experiment: the first run with the same overrides but for the seed.
    experiments: Mapping[str, str]
    overrides: Mapping[str, list[str]]  # Hydra overrides by run
    # For each run, the run that makes the cold start of its policies. A run that brings its own
    # models has no entry.
    cold_start_owner: Mapping[str, str]
    cross_play: CrossPlay
    # For each run, the first run whose untrained team is evaluated in the same way.
    base_evaluation_owner: Mapping[str, str]
    # For each run, the first run with the same tasks and the same retriever. Its tasks, its index and
    # the probe of its retrieval server are also those of this run.
    task_owner: Mapping[str, str]
    scale: str = "paper"  # or "tiny"
    folder: Path | None = None  # folder of the suite file
    configs: Path | None = None  # the user's configs, which take precedence over the shipped ones
    _run_configs: dict[str, RunConfig] = field(default_factory=dict, compare=False)

    @classmethod
    def load(
        cls, suite: Mapping[str, Any], folder: Path | None = None, cache: Path | None = None
    ) -> Self:
        """Check the content of a suite file and compose the config of each of its runs.

        Python modules in `folder`, and next to the user's configs, can be imported afterwards in
        this process and in its children.

        Args:
            suite: the content of the suite file.
            folder: folder of the suite file.
            cache: folder of the cache of resolved configs, or None to compose all of them.

        Raises:
            SuiteError: a key is unknown or of the wrong type, a folder does not exist or cannot be
                written, `evaluate` names a run or an agent that does not exist, or overrides do not
                compose. The message has a line for each run whose overrides do not compose, and else
                names the first mistake.
        """
        suite_file.check_schema(suite)
        configs = suite_file.user_configs_folder(suite, folder)
        code_folders = [folder, configs.parent if configs else None]
        code = [path.resolve() for path in code_folders if path]
        suite_file.make_importable(*code)
        suite_file.check_writable(Path(suite.get("results", "results")))

        overrides = _run_overrides(suite)
        config_cache = None
        if cache:
            config_cache = ConfigCache(cache / f"{suite['suite']}.json", configs, code)
        runs = _compose_runs(suite, overrides, configs, config_cache)
        if config_cache:
            config_cache.save()

        cold_start_owner, runs = _assign_cold_starts(
            runs, shared=bool(suite.get("share_cold_starts"))
        )
        run_experiments = _group_seeds(overrides)
        # Runs that share a cold start share the evaluation of their untrained teams. Only the run that
        # makes the cold start still has the section `cold_start`, so this section is not compared.
        # The folder of a policy's model shows with which cold start it begins.
        evaluated_runs = {run: {**config, "cold_start": None} for run, config in runs.items()}
        return cls(
            name=suite["suite"],
            runs=_add_tags(runs, suite["suite"], run_experiments),
            experiments=run_experiments,
            overrides=overrides,
            cold_start_owner=cold_start_owner,
            cross_play=_check_cross_play(suite.get("evaluate", {}), runs),
            folder=folder,
            configs=configs,
            base_evaluation_owner=sharing.stage_owners(evaluated_runs, "evaluate"),
            task_owner=sharing.stage_owners(runs, "index"),
            scale=suite.get("scale", "paper"),
        )

    @property
    def states(self) -> list[str]:
        """The names of all evaluations: "base", "trained", and those of cross-play."""
        cross_play = [state for states in self.cross_play.values() for state in states]
        return list(dict.fromkeys([*STATES, *cross_play]))

    @property
    def evaluations(self) -> list[str]:
        """Every evaluation, as `run/evaluation/state`."""
        return [
            f"{run}/evaluation/{state}"
            for run in self.runs
            for state in (*STATES, *self.cross_play.get(run, ()))
        ]

    def seats(self, run: str, state: str) -> Mapping[str, Any]:
        """Return, by agent, the source of the model that replaces the run's own policy."""
        return self.cross_play.get(run, {}).get(state, {})

    def trained_runs_for(self, run: str, state: str) -> list[str]:
        """Return the runs whose trained policies play in an evaluation."""
        seats = self.seats(run, state)
        sources = [source for source in seats.values() if isinstance(source, str)]
        if state != "base" and any(agent not in seats for agent in self.runs[run]["agents"]):
            sources.append("trained")  # the run's own policies play the remaining agents

        trained_runs = []
        for source in sources:
            name = source.partition("/")[0]
            if name != "base":
                trained_runs.append(run if name == "trained" else name)
        return list(dict.fromkeys(trained_runs))

    @property
    def cold_start_pattern(self) -> str:
        """A regular expression that matches the runs that make a cold start."""
        return _pattern([run for run, owner in self.cold_start_owner.items() if run == owner])

    def builds_index(self, run: str) -> bool:
        """Return True if the run's index is built by the pipeline, not published or on servers elsewhere.

        This is also True of a run that links such an index from another run, together with its tasks.
        """
        return self.index_manifest(run) == f"{self.runs[run]['results']}/{run}/index/index.json"

    def index_manifest(self, run: str) -> str | None:
        """Return the path of the manifest of the index that a run's retrieval server searches.

        Return None if the run has no retriever, or if servers elsewhere are named.
        """
        retriever = self.runs[run].get("retriever")
        if retriever is None or retriever.get("urls"):
            return None
        folder = retriever.get("folder") or f"{self.runs[run]['results']}/{run}/index"
        return f"{folder}/index.json"

    def data_files(self, run: str) -> list[str]:
        """Return the data files from which the tasks and passages of a run are read."""
        files = [str(path) for path in self.run_config(run).data.paths]
        retriever = self.runs[run].get("retriever") or {}
        if retriever.get("passages"):
            files.append(retriever["passages"])
        return files

    def data_folders(self, run: str) -> list[str]:
        """Return the folder that a run's generator reads, such as that of DSBench."""
        data = self.run_config(run).data
        if data.generator is None or ":" in data.generator:
            return []
        folder = data.options.get("folder")
        return [folder] if isinstance(folder, str) else []

    def model_files(self, run: str) -> list[str]:
        """Return the config.json of the encoder and, in a run without a cold start, of the policies' models."""
        folders = []
        retriever = self.runs[run].get("retriever") or {}
        if retriever.get("encoder_folder"):
            folders.append(retriever["encoder_folder"])
        if run not in self.cold_start_owner:
            policies = self.runs[run]["policies"].values()
            folders += [policy["model"] for policy in policies if policy["model"]]
        return [f"{folder}/config.json" for folder in dict.fromkeys(folders)]

    @property
    def tiny_files(self) -> dict[str, str]:
        """The data files that the scale `tiny` makes, each with its format or "passages"."""
        if self.scale != "tiny":
            return {}
        formats: dict[str, str] = {}
        for run in self.runs:
            data = self.run_config(run).data
            formats |= dict.fromkeys(self.data_files(run), "passages")
            # The files of tasks are among these, and have a format of their own.
            for split in SPLITS:
                for file in data.files(split):
                    formats[str(file.path)] = file.format or data.format
        return formats

    def run_config(self, run: str) -> RunConfig:
        """Return the validated config of a run."""
        if run not in self._run_configs:
            self._run_configs[run] = RunConfig.from_values(dict(self.runs[run]), f"run '{run}'")
        return self._run_configs[run]

    def config_path(self, run: str) -> Path:
        """Return the file of the resolved config of a run."""
        return Path(self.runs[run]["results"]) / run / "config.yaml"

    def write_configs(self, runs: Iterable[str | None]) -> None:
        """Write the resolved configs of `runs`, each atomically; ignore names that are not runs, and None."""
        for run in self.runs.keys() & set(runs):
            text = yaml.safe_dump(
                dict(self.runs[run]), sort_keys=False, allow_unicode=True, width=120
            )
            write_text(self.config_path(run), text)

    def written_folders(self, outputs: Iterable[str]) -> list[Path]:
        """Return the folders that a pipeline with these outputs must lock.

        These are the folders of the runs, the folders of outputs elsewhere, and a folder that
        stands for the suite's tables and report. Suites without a common run can run side by side.
        """
        results = Path(next(iter(self.runs.values()))["results"])
        folders = {Path(".snakemake", "suites", self.name)}
        for path in map(Path, outputs):
            if not path.is_relative_to(results):
                folders.add(path.parent)
                continue
            name = path.relative_to(results).parts[0]
            if name not in _SHARED_FOLDERS:
                folders.add(results / name)
        return sorted(folders)

    def run_pattern(self, *, builds_index: bool, links_tasks: bool = False) -> str:
        """Return a regular expression that matches the runs of one kind.

        Args:
            builds_index: True: match runs whose index is built by the pipeline; False: other runs.
            links_tasks: True: match runs that link their tasks from another run and, with
                `builds_index`, also that run's index; False: runs that make their own.
        """
        matches = []
        for run in self.runs:
            run_links_tasks = self.task_owner[run] != run
            if self.builds_index(run) is builds_index and run_links_tasks is links_tasks:
                matches.append(run)
        return _pattern(matches)


def load_suite(suite: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Suite:
    """Load a suite file, or the suite of one experiment.

    Args:
        suite: a suite file, or the name of an experiment.
        overrides: Hydra overrides that are added to every run.
        config_dir: folder of the user's configs, or None for that of the suite.

    Raises:
        SuiteError: there is no such file or experiment, or the suite cannot be used.
        ConfigError: the file of an experiment cannot be used.
    """
    path = Path(suite)
    values = suite_values(suite, config_dir)
    if overrides:
        values["overrides"] = [*values.get("overrides", []), *overrides]
    return Suite.load(values, path.parent.resolve() if path.is_file() else None)


def suite_values(suite: str, config_dir: Path | None = None) -> dict[str, Any]:
    """Return the content of a suite file, checked by its schema, or of a suite with one experiment.

    Args:
        suite: a suite file, or the name of an experiment.
        config_dir: folder of the user's configs, which replaces that of the suite file. For an
            experiment, None stands for the folder `configs` of the current folder.

    Raises:
        SuiteError: there is no such file or experiment, the file is not YAML or not of the schema,
            or `config_dir` is no folder.
        ConfigError: the file of an experiment cannot be used.
    """
    path = Path(suite)
    configs = suite_file.user_configs_folder({"config_dir": config_dir}, Path())
    config_dir_entry = {}
    # In a checkout of this project, the folder `configs` here may be the shipped one, which is
    # always searched.
    if configs and (config_dir or configs != CONFIGS):
        config_dir_entry = {"config_dir": str(configs)}

    if path.is_file():
        try:
            values = read_yaml(path)
        except yaml.YAMLError as error:
            raise SuiteError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
        if not isinstance(values, dict):
            raise SuiteError(f"{path}: a suite is a mapping of keys (docs/configuration.md)")
        if config_dir:
            values |= config_dir_entry
        suite_file.check_schema(values, str(path))
        return values

    experiment_names = list(experiments())
    if configs:
        experiment_names += experiments(configs)
    if suite not in experiment_names:
        project_suite = path / f"{path.name}.yaml"
        if project_suite.is_file():
            raise SuiteError(
                f"{suite}: a folder; expected a suite file or an experiment; go into the folder "
                f"(cd {shlex.quote(suite)}) and name {project_suite.name}"
            )
        hint = nearest_hint(suite, [*experiment_names, *map(str, Path().glob("*.yaml"))])
        raise SuiteError(
            f"{suite}: no such file, and no experiment of this name "
            f"(`mcore-mas list experiments`){hint}"
        )
    return {"suite": suite, "experiments": {suite: [f"experiment={suite}"]}, **config_dir_entry}


def _run_overrides(suite: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the Hydra overrides of each run of a suite, grids included."""
    run_overrides = {
        **suite.get("experiments", {}),
        **suite_file.combinations(suite.get("grid")),
    }
    suite_overrides = suite.get("overrides", [])
    return {run: [*overrides, *suite_overrides] for run, overrides in run_overrides.items()}


def _compose_runs(
    suite: Mapping[str, Any],
    overrides: Mapping[str, Sequence[str]],
    configs: Path | None,
    cache: ConfigCache | None,
) -> dict[str, dict[str, Any]]:
    """Return the resolved config of each run.

    Raises:
        SuiteError: overrides do not compose; a mistake that several runs share is named once.
    """
    runs: dict[str, dict[str, Any]] = {}
    lines_by_mistake: dict[str, str] = {}
    for run, run_overrides in overrides.items():
        try:
            runs[run] = _compose_run(suite, run, run_overrides, configs, cache)
        except SuiteError as error:
            mistake = str(error.__cause__ or error).removeprefix(f"run '{run}': ")
            lines_by_mistake.setdefault(mistake, str(error))
    if lines_by_mistake:
        raise SuiteError("\n  ".join(lines_by_mistake.values()))
    return runs


def _compose_run(
    suite: Mapping[str, Any],
    run: str,
    overrides: Sequence[str],
    configs: Path | None,
    cache: ConfigCache | None,
) -> dict[str, Any]:
    """Return the resolved config of a run, with its placement on GPUs."""
    for override in overrides:
        if override.startswith("results="):
            raise SuiteError(
                f"run '{run}': {override}: all runs of a suite have one folder; write `--config "
                f"{override}` in a command, or results: in the suite file"
            )
    scale = suite.get("scale", "paper")
    settings = [*overrides, f"run={run}", f"results={suite.get('results', 'results')}"]

    def compose() -> dict[str, Any]:
        try:
            values = resolve(settings, configs, scale, sections={"run": run})
            gpus = values["cluster"]["gpus"]
            if scale != "paper" or gpus is None:
                return values
            config = RunConfig.from_values(values, f"run '{run}'")
            return place_run(config, Cluster.parse(gpus)).model_dump(mode="json")
        except (ConfigError, ModelError, PlanError) as error:
            prefix = f"run '{run}': "
            message = str(error).removeprefix(prefix)
            raise SuiteError(f"{prefix}{message} ({' '.join(overrides)})") from error

    if cache is None:
        return compose()
    return cache.get({"overrides": settings, "scale": scale}, compose)


def _assign_cold_starts(
    runs: dict[str, dict[str, Any]], *, shared: bool
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Choose for each run with a section `cold_start` the run that makes its cold start.

    If cold starts are shared, this is the first run with the same settings of the cold start, and
    else the run itself.

    Returns:
        By run, the run that makes its cold start; and the configs of all runs. A config that shares
        the cold start of another run names the models of that run, and has no section `cold_start`.
    """
    cold_started = {
        run: config for run, config in runs.items() if config.get("cold_start") is not None
    }
    if not shared:
        return {run: run for run in cold_started}, runs
    owners = sharing.stage_owners(cold_started, "cold_start")
    configs = {
        run: sharing.with_cold_start_of(config, owners.get(run, run))
        for run, config in runs.items()
    }
    return owners, configs


def _group_seeds(overrides: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return for each run the first run with the same overrides, ignoring the seed."""
    without_seed = {
        run: [item for item in items if item.partition("=")[0] != "seed"]
        for run, items in overrides.items()
    }
    return sharing.first_equal(without_seed.items())


def _add_tags(
    runs: sharing.Runs, suite: str, run_experiments: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the configs with the suite and the experiment as tags of MLflow's runs.

    Tags that are set in a config take precedence.
    """
    tagged = {}
    for run, config in runs.items():
        suite_tags = {"suite": suite, "experiment": run_experiments[run]}
        tags = {**suite_tags, **config["tracking"].get("tags", {})}
        tagged[run] = {**config, "tracking": {**config["tracking"], "tags": tags}}
    return tagged


def _check_cross_play(cross_play: CrossPlay, runs: sharing.Runs) -> CrossPlay:
    """Return the evaluations of a suite after checking that their runs and agents exist.

    Raises:
        SuiteError: a run or an agent does not exist.
    """
    for run, states in cross_play.items():
        if run not in runs:
            raise SuiteError(f"evaluate: no run '{run}'; runs: {', '.join(runs)}")
        for state, seats in states.items():
            for agent, source in seats.items():
                key = f"evaluate.{run}.{state}.{agent}"
                _check_seat(key, runs[run], agent, source, runs)
    return cross_play


def _check_seat(
    key: str, config: Mapping[str, Any], agent: str, source: Any, runs: sharing.Runs
) -> None:
    """Check that an agent of an evaluation and the source of its policy exist.

    Args:
        key: key of the suite, for the message.
        config: config of the run that is evaluated.
        agent: name of the agent.
        source: "base", "trained", a run, run/agent, or a mapping of a model folder or an API.
        runs: configs of all runs.
    """
    if agent not in config["agents"]:
        raise SuiteError(f"{key}: no such agent; agents: {', '.join(config['agents'])}")
    if not isinstance(source, str) or source in STATES:
        return

    source_run, _, source_agent = source.partition("/")
    source_agent = source_agent or agent
    if source_run not in runs:
        raise SuiteError(
            f"{key}: no run '{source_run}'; expected base, trained, a run ({', '.join(runs)}), "
            "run/agent, {model: folder} or {remote: ...}"
        )
    source_agents = runs[source_run]["agents"]
    if source_agent not in source_agents:
        raise SuiteError(
            f"{key}: run '{source_run}' has no agent '{source_agent}'; agents: "
            f"{', '.join(source_agents)}"
        )


def _pattern(names: Sequence[str]) -> str:
    """Return a regular expression that matches these names; without names it matches nothing."""
    return "|".join(map(re.escape, names)) or "(?!)"
