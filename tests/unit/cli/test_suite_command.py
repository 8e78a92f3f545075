"""A suite runs with Snakemake, with Hydra overrides and one `--config`."""

from pathlib import Path

import pytest

from mcore_mas.cli.arguments import UsageError
from mcore_mas.cli.suite_command import snakemake_arguments, split_overrides
from mcore_mas.pipeline.suite_file import SuiteError


@pytest.fixture
def suite(tmp_path: Path) -> str:
    """Return a suite file with an override of its own."""
    file = tmp_path / "s.yaml"
    file.write_text("{suite: s, experiments: {a: [experiment=demo_math]}, overrides: [seed=3]}")
    return str(file)


def arguments_after_snakefile(
    suite: str, arguments: list[str], config_dir: Path | None = None
) -> list[str]:
    """Return the arguments of Snakemake after `--snakefile FILE`."""
    option, _, *others = snakemake_arguments(suite, arguments, config_dir)
    assert option == "--snakefile"
    return others


def test_arguments_of_snakemake_are_passed_on(suite: str) -> None:
    assert arguments_after_snakefile(suite, ["-n"]) == [f"--configfile={suite}", "-n"]


def test_overrides_follow_those_of_the_suite_file(suite: str) -> None:
    arguments = ["a.b=1", "~c", "x/y.json", "--config", "scale=tiny", "-n"]
    assert arguments_after_snakefile(suite, arguments) == [
        f"--configfile={suite}",
        "x/y.json",
        "--config",
        'overrides=["seed=3", "a.b=1", "~c"]',
        "scale=tiny",
        "-n",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"s\.yaml: a suite is a mapping of keys"),
        ("[experiment=demo_math]", r"s\.yaml: a suite is a mapping of keys"),
        (
            "{suite: s, experiments: {a: []}, overrides: }",
            r"s\.yaml: suite\.overrides: expected a list .*\(got None\)",
        ),
        (
            "{suite: s, experiments: {a: []}, overrides: seed=3}",
            r"s\.yaml: suite\.overrides: .*\(got 'seed=3'\)",
        ),
    ],
)
def test_a_malformed_suite_file_is_refused_before_snakemake_starts(
    suite: str, text: str, message: str
) -> None:
    Path(suite).write_text(text)
    with pytest.raises(SuiteError, match=message):
        arguments_after_snakefile(suite, ["trainer.steps=3"])


def test_config_dir_is_passed_on(suite: str, tmp_path: Path) -> None:
    assert arguments_after_snakefile(suite, ["-n"], tmp_path) == [
        f"--configfile={suite}",
        "-n",
        "--config",
        f'config_dir="{tmp_path.resolve()}"',
    ]


def test_an_experiment_is_a_suite_of_its_own() -> None:
    assert arguments_after_snakefile("demo_math", ["-n"]) == [
        "-n",
        "--config",
        'suite="demo_math"',
        'experiments={"demo_math": ["experiment=demo_math"]}',
    ]


def test_overrides_are_told_from_values_of_snakemakes_options() -> None:
    line = "-n a.b=1 --cores 2 ~c --config scale=tiny x/y=1.json --quiet rules +d=2"
    overrides, others = split_overrides(line.split(" "))
    assert overrides == ["a.b=1", "~c", "+d=2"]
    assert others == [
        "-n",
        "--cores",
        "2",
        "--config",
        "scale=tiny",
        "x/y=1.json",
        "--quiet",
        "rules",
    ]


@pytest.mark.parametrize(
    "arguments", [["--config", "a=1", "--config", "b=2"], ["--config=a=1"], ["-Ca=1"]]
)
def test_config_values_that_snakemake_would_lose_are_refused(
    suite: str, arguments: list[str]
) -> None:
    with pytest.raises(UsageError, match="Snakemake uses only the last --config; write one"):
        arguments_after_snakefile(suite, ["trainer.steps=3", *arguments])
