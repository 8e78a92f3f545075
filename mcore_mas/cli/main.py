"""Command line: `mcore-mas`, also `python -m mcore_mas`; the commands that start something, and how they are run."""

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mcore_mas import with_pages
from mcore_mas.cli.inspection import inspection_commands
from mcore_mas.cli.machine import ConfigFile, RunFolder, UsageError, machine_commands, run_commands
from mcore_mas.runtime.joblog import describe_error
from mcore_mas.runtime.stop_signal import Stopped, stop_at_start
from rollout.base.text import nearest, show_logs

app = typer.Typer(
    name="mcore-mas",
    help="Reinforcement-learning post-training of teams of LLM agents on Megatron-core.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="What goes wrong is one line and a non-zero exit; --debug, anywhere, adds the traceback.",
)
_PANEL = "Train and evaluate"
_Suite = Annotated[str, typer.Argument(help="A suite file, or the name of an experiment.")]
_Host = Annotated[str, typer.Option(help="Address to listen on.")]
_Port = Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535)]
_TokenFile = Annotated[
    Path | None, typer.Option(help="Bearer token; required for a host that is not loopback.")
]
_Configs = Annotated[
    Path | None, typer.Option(help="Folder of your own configs, if it is another.")
]
_Overrides = Annotated[
    list[str] | None, typer.Argument(help="Hydra overrides of every run, such as trainer.steps=3.")
]


def _version(asked: bool) -> None:
    if asked:
        print(f"mcore-mas {version('mcore-mas')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of teams of LLM agents on Megatron-core."""
    show_logs()


@app.command(
    "run",
    rich_help_panel=_PANEL,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def run_suite(context: typer.Context, suite: _Suite, config_dir: _Configs = None) -> None:
    """Run the pipeline on a suite.

    Experiments and teams of your own lie in configs/ beside the suite file; of an experiment's name alone, in configs/
    here. Further arguments are overrides of every run (trainer.steps=3), then Snakemake's, such as -n: what would run.
    """
    command = snakemake_command(suite, context.args, config_dir)
    os.execv(command[0], command)  # noqa: S606


# options of Snakemake that take words such as NAME=VALUE
_PAIRS = "--batch --config -C --consider-ancient --default-resources --default-res --group-components --groups"
_PAIRS += " --res --resources --set-resource-scopes --set-resources --set-scatter --set-threads"


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(Hydra's overrides, what is Snakemake's) of a command line, in any order."""
    overrides: list[str] = []
    rest: list[str] = []
    option = ""
    for word in arguments:
        option = word if word.startswith("-") else option
        own = re.match(r"~|\+{0,2}\w[^/=]*=", word) and option not in _PAIRS.split()
        (overrides if own else rest).append(word)
    return overrides, rest


def snakemake_command(suite: str, arguments: Sequence[str], config_dir: Path | None) -> list[str]:
    """The command that runs a suite: its own config goes into the one `--config` that Snakemake heeds.

    Raises:
        SuiteError: there is no such suite, experiment or `config_dir`.
        UsageError: Snakemake has no such option, or nothing makes a target.
    """
    from mcore_mas.pipeline.suite import SNAKEFILE, suite_values

    (overrides, rest), file = split_overrides(arguments), Path(suite).is_file()
    values = suite_values(suite, config_dir)
    own = [] if file else [f"{key}={json.dumps(value)}" for key, value in values.items()]
    if overrides:  # in place of the file's, which come first
        earlier = values.get("overrides", []) if isinstance(values, dict) else []
        own.append(f"overrides={json.dumps([*earlier, *overrides])}")
    own += [f"config_dir={config_dir.resolve()}"] if config_dir and file else []
    _check_for_snakemake(rest)
    at = next((n for n, word in enumerate(rest) if word in ("--config", "-C")), len(rest))
    given = [*rest[:at], "--config", *own, *rest[at + 1 :]] if own else rest
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE)]
    return [*command, *([f"--configfile={suite}"] if file else []), *given]


def _check_for_snakemake(words: Sequence[str]) -> None:
    """Refuse options that Snakemake does not have, and targets that nothing makes."""
    from snakemake.cli import get_argument_parser

    from mcore_mas.pipeline.suite import SNAKEFILE

    def refuse(message: str) -> NoReturn:
        near = nearest(message.rpartition(" ")[2], [*parser._option_string_actions, "--config-dir"])
        raise UsageError(
            f"{message}; `mcore-mas run --help` and `snakemake --help` list what there is{near}"
        )

    parser = get_argument_parser()
    parser.error = refuse
    files = (SNAKEFILE, *SNAKEFILE.parent.glob("rules/*.smk"))
    rules = re.findall(
        r"^rule (\w+):", "".join(file.read_text(encoding="utf-8") for file in files), re.MULTILINE
    )
    for word in parser.parse_args(list(words)).targets:
        if not re.match(r"(table|bundle|acquire)_|.*/", word) and word not in rules:
            known = (
                "a file such as results/RUN/train/done.json, a rule, or KEY=VALUE without spaces"
            )
            known += nearest(word, rules)
            raise UsageError(f"no target '{word}'; expected {known}")


@app.command("new", rich_help_panel=_PANEL)
def new_team(
    name: Annotated[str, typer.Argument(help="Of the project, and of its Python package.")],
) -> None:
    """Write a project of your own: team, environment, reward, tasks and test, which learn in minutes on a laptop."""
    from mcore_mas.pipeline.base_model import new_project

    folder = new_project(name, Path())
    print(f"{folder}/  next: cd {folder}; mcore-mas check {name}.yaml; mcore-mas run {name}.yaml")


@app.command("check", rich_help_panel=_PANEL)
def check_runs(suite: _Suite, overrides: _Overrides = None, config_dir: _Configs = None) -> None:
    """Say everything that is known to fail, before it costs anything: models, layouts, lengths, prompts, files."""
    from mcore_mas.pipeline.check import problems
    from mcore_mas.pipeline.suite import load_suite

    loaded = load_suite(suite, overrides or [], config_dir)
    lines = problems(loaded)
    print("\n".join(f"no: {with_pages(line)}" for line in lines) or f"ok: {', '.join(loaded.runs)}")
    raise typer.Exit(1 if lines else 0)


@app.command("plan", rich_help_panel=_PANEL)
def plan_suite(
    suite: _Suite,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Number and kind of GPUs; by default cluster.gpus of each run, or 8xH100."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="YAML file in place of --gpus: gpus, node (GPUs of one), memory (GB)."),
    ] = None,
    as_configured: Annotated[
        bool,
        typer.Option("--as-configured", help="Check the placement in the config; choose none."),
    ] = False,
    config_dir: _Configs = None,
) -> None:
    """Print the placement and the memory of every run on these GPUs; exit status 1 if one does not fit."""
    from mcore_mas.pipeline.suite import load_suite
    from mcore_mas.planning.gpus import Cluster, PlanError
    from mcore_mas.planning.page import plan_lines
    from mcore_mas.planning.place import check_placement, place_run

    named_cluster: Cluster | None = None
    if cluster is not None:
        named_cluster = Cluster.read(cluster)
    elif gpus is not None:
        named_cluster = Cluster.parse(gpus)

    fits = True
    loaded = load_suite(suite, config_dir=config_dir)
    for run in loaded.runs:
        config = loaded.checked(run)
        run_cluster = named_cluster or Cluster.parse(config.cluster.gpus or "8xH100")
        try:
            if as_configured:
                check_placement(config, run_cluster)
            else:
                config = place_run(config, run_cluster)
        except PlanError as error:
            fits = False
            print(f"no: {error}")
            continue
        for line in plan_lines(config, run_cluster):
            print(line)
    raise typer.Exit(0 if fits else 1)


@app.command("plan-index", rich_help_panel=_PANEL)
def plan_index(
    passages: Annotated[
        int, typer.Argument(min=1, help="Number of passages; wiki-18 has 21015324.")
    ],
    dim: Annotated[
        int, typer.Option(min=8, help="Of the encoder: 768 of E5-base and BGE-base, 384 of MiniLM.")
    ] = 768,
    rate: Annotated[
        float, typer.Option(min=0.1, help="Passages that all jobs encode in a second.")
    ] = 50.0,
) -> None:
    """Print the memory, disk and hours that each kind of search index would take, by formula."""
    from mcore_mas.planning.indexes import index_table

    for line in index_table(passages, dim, rate):
        print(line)


@app.command("train", rich_help_panel=_PANEL)
def train_run(
    run: ConfigFile,
    address: Annotated[
        str | None, typer.Option(help="Of a running Ray, in place of cluster.address.")
    ] = None,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Fork a run of another recipe or code.")
    ] = False,
) -> None:
    """Train one run, from its newest checkpoint if it has one."""
    stop_at_start()
    from mcore_mas.training.train import train

    train(run, address, adopt=adopt)


@app.command("evaluate", rich_help_panel=_PANEL)
def evaluate_run(
    run: ConfigFile,
    state: Annotated[
        str, typer.Option(help="base or trained; with --seat, a name for what plays.")
    ] = "trained",
    out: Annotated[
        Path | None, typer.Option(help="JSON file; by default evaluation/{state}.json of the run")
    ] = None,
    seat: Annotated[
        list[str] | None,
        typer.Option(
            help="AGENT=WHO, where WHO is base, trained, RUN, RUN/AGENT, {model: FOLDER} or {remote: ...}."
        ),
    ] = None,
) -> None:
    """Measure a team on its test tasks: avg@k, pass@k and maj@k per data source."""
    from mcore_mas.config.run import RunConfig
    from mcore_mas.evaluation.evaluate import evaluate, read_seats
    from mcore_mas.tracking.publish import publish_evaluation

    seats = read_seats(state, seat or [])
    path = out or RunConfig.load(run).folder / "evaluation" / f"{state}.json"
    evaluate(run, state, path, seats)
    print(path)
    publish_evaluation(run, lambda line: print(line, file=sys.stderr))


@app.command("serve", rich_help_panel=_PANEL)
def serve_run(
    run: RunFolder,
    state: Annotated[str, typer.Option(help="base or trained.")] = "trained",
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    token_file: _TokenFile = None,
    most_calls: Annotated[
        int, typer.Option(help="Answered at a time; further ones get status 429.", min=1)
    ] = 256,
    most_connections: Annotated[
        int, typer.Option(help="Open at a time; while there are more, calls get status 503.", min=1)
    ] = 1024,
) -> None:
    """Answer as models of OpenAI's and Anthropic's APIs: the whole team by the run's name, and each of its agents."""
    from mcore_mas.evaluation.serve import serve

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        limits = {"most_calls": most_calls, "most_connections": most_connections}
        serve(run, state=state, host=host, port=port, token_file=token_file, **limits)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command("studio", rich_help_panel=_PANEL)
def studio(
    results: Annotated[Path, typer.Argument(help="Folder of the runs.")] = Path("results"),
    host: _Host = "127.0.0.1",
    port: _Port = 8001,
    token_file: _TokenFile = None,
) -> None:
    """Look at runs in a browser, live: curves by agent and policy, conversations, credit, two runs side by side."""
    from mcore_mas.reports.studio import open_studio

    open_studio(results, host=host, port=port, token_file=token_file)


@app.command("export", rich_help_panel=_PANEL)
def export_policy(
    run: RunFolder,
    policy: Annotated[str, typer.Argument(help="One of its trained policies.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write, empty or not there.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the adapter of a LoRA policy, for PEFT.")
    ] = False,
) -> None:
    """Write a policy as a Hugging Face folder, from its finished model or else its newest valid checkpoint."""
    from mcore_mas.evaluation.export import export

    export(run, policy, to, lambda line: print(line, file=sys.stderr), adapter=adapter)
    print(to)


for group in (run_commands, inspection_commands, machine_commands):
    app.add_typer(group)


def main() -> None:
    """Run a command; what goes wrong is one line on stderr and exit status 1, unless --debug asks for the traceback."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    arguments = [*arguments[1:2], "--help"] if arguments[:1] == ["help"] else arguments
    sys.path.append(str(Path.cwd()))  # a team of one's own is found where one stands
    try:
        sys.exit(app(arguments, prog_name="mcore-mas", standalone_mode=False) or 0)
    except Stopped as stop:
        print(stop, file=sys.stderr)
        sys.exit(143)
    except Exception as error:
        if debug:
            raise
        if context := getattr(error, "ctx", None):  # the call does not parse
            said = " ".join(error.format_message().split()).rstrip(".?")  # type: ignore[attr-defined]
            if said:  # else the help was shown, because nothing was asked
                print(
                    f"error: {said}; `{context.command_path} --help` says what is expected",
                    file=sys.stderr,
                )
            sys.exit(2)
        print(
            f"error: {with_pages(describe_error(error))}  (--debug shows the traceback)",
            file=sys.stderr,
        )
        sys.exit(1)
