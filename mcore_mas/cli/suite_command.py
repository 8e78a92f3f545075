"""Snakemake on a suite, with Hydra overrides of every run."""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any

from mcore_mas.cli.arguments import UsageError, setting_hint, setting_names
from mcore_mas.pipeline.suite import suite_values
from mcore_mas.pipeline.suite_file import SNAKEFILE
from mcore_mas.runtime.stop_signal import undo_raise_on_stop_signals
from rollout.base.hints import nearest_hint

# Options of Snakemake whose values look like Hydra overrides: NAME=VALUE
_OPTIONS_WITH_PAIRS = {
    "--batch",
    "--config",
    "-C",
    "--consider-ancient",
    "--default-resources",
    "--default-res",
    "--group-components",
    "--groups",
    "--res",
    "--resources",
    "--set-resource-scopes",
    "--set-resources",
    "--set-scatter",
    "--set-threads",
}
# A Hydra override: ~KEY, KEY=, +KEY= or ++KEY=. A word with "/" before the "=" is the path of a target.
_OVERRIDE = re.compile(r"~|\+{0,2}\w[^/=]*=")


def snakemake_arguments(suite: str, arguments: Sequence[str], config_dir: Path | None) -> list[str]:
    """Return the arguments with which Snakemake runs a suite.

    Args:
        suite: a suite file, or the name of an experiment.
        arguments: Hydra overrides of every run, and arguments of Snakemake, in any order.
        config_dir: folder of the user's configs; None: configs/ beside the suite file, or in the current
            folder for an experiment.

    Raises:
        SuiteError: there is no such suite, experiment or `config_dir`, or the suite file is not of the
            schema.
        ConfigError: the file of an experiment cannot be used.
        UsageError: Snakemake does not take these arguments, or would misunderstand them.
    """
    overrides, other_arguments = split_overrides(arguments)
    _check_arguments(other_arguments)
    values = suite_values(suite, config_dir)

    source = ["--snakefile", str(SNAKEFILE)]
    settings: dict[str, Any] = {}  # for Snakemake's option --config
    is_file = Path(suite).is_file()
    if is_file:
        source.append(f"--configfile={suite}")
    else:
        settings.update(values)  # an experiment has no suite file that Snakemake could read
    if overrides:
        # --config replaces the overrides in a suite file, so they are given again.
        settings["overrides"] = [*values.get("overrides", []), *overrides]
    if is_file and config_dir is not None:
        settings["config_dir"] = str(config_dir.resolve())
    return [*source, *_add_settings(other_arguments, settings)]


def run_snakemake(arguments: Sequence[str]) -> None:
    """Run Snakemake in this process, which ends with it; another process would import everything again."""
    from snakemake.cli import main

    undo_raise_on_stop_signals()
    sys.argv = ["snakemake", *arguments]  # the Snakefile reads them
    main()


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into Hydra overrides and arguments of Snakemake.

    Overrides are recognized by their form. After an option of Snakemake that takes NAME=VALUE, all
    words up to the next option are its values.
    """
    overrides: list[str] = []
    snakemake_arguments: list[str] = []
    option = ""
    for argument in arguments:
        if argument.startswith("-"):
            option = argument
        if _OVERRIDE.match(argument) and option not in _OPTIONS_WITH_PAIRS:
            overrides.append(argument)
        else:
            snakemake_arguments.append(argument)
    return overrides, snakemake_arguments


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise UsageError for arguments that Snakemake does not take, or would misunderstand."""
    _check_options(arguments)
    if "=" in arguments:
        raise UsageError("no target '='; write an override as KEY=VALUE, without spaces")
    config_options = [argument for argument in arguments if re.match(r"--config(=|$)|-C", argument)]
    is_joined = any(option not in ("--config", "-C") for option in config_options)
    # `_add_settings` puts the suite's settings behind --config, which must therefore be a word of its own.
    if is_joined or len(config_options) > 1:
        raise UsageError(
            f"{' '.join(config_options)}: Snakemake uses only the last --config; write one, with all "
            "its values behind it, such as --config results=my_results scale=tiny"
        )


def _check_options(arguments: Sequence[str]) -> None:
    """Raise UsageError for wrong options of Snakemake, whose own error begins with the list of all options."""
    from snakemake.cli import get_argument_parser

    parser = get_argument_parser()
    printed = StringIO()
    try:
        with redirect_stderr(printed):
            _, unknown = parser.parse_known_args(list(arguments))
    except SystemExit as error:  # an option is ambiguous, or has a wrong value
        message = printed.getvalue().rpartition("error: ")[2].strip()
        raise UsageError(f"{message}{_setting_hints(arguments)}") from error
    options = [argument for argument in unknown if argument.startswith("-")]
    if options:
        hints = _setting_hints(options)
        if not hints:
            all_options: list[str] = []
            for action in parser._actions:
                all_options += action.option_strings
            hints = "".join(_option_hint(option, all_options) for option in options)
        raise UsageError(
            f"unrecognized arguments: {' '.join(options)}{hints}; `mcore-mas run --help` and "
            "`snakemake --help` list the options"
        )


def _option_hint(option: str, all_options: Sequence[str]) -> str:
    """Return a hint at the options of Snakemake or the setting of a run that an unknown option resembles, or ""."""
    settings = setting_names()
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    option_names = {text.lstrip("-").replace("-", "_") for text in all_options}
    nearest = get_close_matches(name, [*option_names, *settings], n=1)
    if nearest and nearest[0] in settings:
        return setting_hint(nearest[0])
    return nearest_hint(option, all_options)


def _setting_hints(arguments: Sequence[str]) -> str:
    """Return hints on how to write the arguments that are settings of a run with dashes, or ""."""
    hints = [setting_hint(argument) for argument in arguments if argument.startswith("-")]
    return "".join(dict.fromkeys(hints))


def _add_settings(arguments: Sequence[str], settings: dict[str, Any]) -> list[str]:
    """Add settings to the values of the option `--config`, which `arguments` contain once at most."""
    if not settings:
        return list(arguments)
    pairs = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    for position, argument in enumerate(arguments):
        if argument in ("--config", "-C"):
            return [*arguments[:position], "--config", *pairs, *arguments[position + 1 :]]
    return [*arguments, "--config", *pairs]
