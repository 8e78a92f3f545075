"""A wrong call of a command is one line and an exit status that is not 0."""

import re
from pathlib import Path

import pytest
import typer

from mcore_mas.cli.main import app
from rollout.base.http_server import open_listener
from rollout.records.files import write_trajectories
from tests.support.finished import finished
from tests.support.played import trajectory, turn
from tests.unit.cli.conftest import CallCommand


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a suite and two runs."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_suite.yaml").touch()
    (folder / "a_project").mkdir()
    (folder / "a_project" / "a_project.yaml").touch()
    for number, run in enumerate(("demo_math", "demo_math2")):
        finished(folder / "results", run, number)
        file = folder / f"results/{run}/train/trajectories/step_000000.parquet"
        write_trajectories(file, [trajectory(turn(0))])
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "train {missing}.yaml",
            "missing.yaml: no run here; expected a run's folder, its name in results/, or its "
            "config.yaml",
        ),
        ("train {text}", "text: holds a str; expected a mapping; name another file"),
        ("train {folder}", ": no run here; expected a run's folder"),
        (
            "evaluate demo_math --state trainde",
            "--state trainde: expected base or trained without --seat; nearest: trained",
        ),
        (
            "evaluate demo_math --seat verifer=base",
            "seat of 'verifer', who is not in the team; agents: solver, verifier; nearest: verifier",
        ),
        (
            "evaluate demo_math --seat verifier=base",
            "--seat verifier=base: with --seat, also give --state NAME, a name for the evaluation other "
            "than base and trained",
        ),
        (
            "evaluate demo_math --state x --seat verifier",
            "--seat verifier: expected AGENT=WHO, for example",
        ),
        (
            "evaluate demo_math --state x --seat solver={{model:",
            "--seat solver={model:: WHO is not YAML (",
        ),
        (
            "evaluate demo_math --state x --seat solver=2024",
            "seat of 'solver': Input should be a valid dictionary or instance of PolicyConfig; "
            "expected base, trained, a run, run/agent, {model: folder} or {remote: ...}",
        ),
        ("evaluate {missing}.yaml", "missing.yaml: no run here; expected a run's folder"),
        (
            "evaluate demo_math --out scores",
            "--out scores: expected a file name with a suffix, such as scores.json, because the "
            "trajectories are written to the folder of this name without the suffix",
        ),
        ("evaluate demo_math --out {scores}", "scores.json: is a folder; name a file"),
        (
            "export {missing} solver --to x",
            "missing: no run here; expected a run's folder, its name in results/",
        ),
        (
            "export demo_math solvr --to x",
            "no policy 'solvr'; policies: solver, verifier; nearest: solver",
        ),
        (
            "chat demo_mth",
            "demo_mth: no run here; expected a run's folder, its name in results/, or its "
            "config.yaml; nearest: demo_math",
        ),
        ("serve demo_mth", "; nearest: demo_math, demo_math2"),
        ("compare demo_math demo_mat", "; nearest: demo_math, demo_math2"),
        (
            "show demo_mth",
            "demo_mth: no such file or run; expected a parquet file of trajectories, or a run; "
            "nearest: demo_math",
        ),
        (
            "show {missing}",
            "missing: no such file or run; expected a parquet file of trajectories, or a run",
        ),
        ("show {folder}", ": no trajectories here; a run that was not trained has none"),
        ("show {text}", "text: not a readable parquet file"),
        ("show demo_math --html {text}/x.html", "/text/x.html: cannot be written, because "),
        ("show demo_math --picture {text}/x", "text is no folder; name another path"),
        ("show demo_math --html {folder}", ": is a folder; name a file"),
        ("export demo_math solver --to {text}/x", "/text/x: cannot be written, because "),
        ("explain {missing}", "missing: no such file or run; expected a parquet file"),
        (
            "explain {text} --option lone",
            "--option lone: expected key=value, for example --option lone=raw",
        ),
        (
            "cross-play second first --ratings",
            "--ratings with agents second and first: expected the players of a game, first and second "
            "in this order; name them, or leave out --ratings",
        ),
        ("leaks", "name a run, data files to compare, or --config with a resolved config"),
        ("leaks {missing}", "missing: no such file"),
        ("check my_suit.yaml", "my_suit.yaml: no such file, and no experiment of this name ("),
        (
            "check a_project",
            "a_project: a folder; expected a suite file or an experiment; go into the folder "
            "(cd a_project) and name a_project.yaml",
        ),
        ("check demo_mat", "(`mcore-mas list experiments`); nearest: demo_math"),
        (
            "check demo_math trainer.learning_rate=3",
            "trainer.learning_rate: unknown key; write policies.*.lr or cold_start.lr",
        ),
        ("check demo_math k=4", ": k: unknown key; write evaluation.samples ("),
        ("check demo_math trainer.max_steps=4", "max_steps: unknown key; write trainer.steps ("),
        (
            "run demo_math --steps 3",
            "unrecognized arguments: --steps; a setting of a run has no dashes: `mcore-mas run "
            "SUITE trainer.steps=...`",
        ),
        ("run demo_math --dryrunn", "arguments: --dryrunn; nearest: --dryrun, --dry-run; "),
        (
            "run demo_math --k 8",
            "ambiguous option: --k could match --keep-going, --keep-incomplete, "
            "--keep-storage-local-copies; a setting of a run has no dashes: `mcore-mas run SUITE "
            "evaluation.samples=...`",
        ),
        (
            "check demo_math results=elsewhere",
            "results=elsewhere: all runs of a suite have one folder; write `--config "
            "results=elsewhere`",
        ),
        ("check demo_math trainer.stepz=3", "trainer.stepz: unknown key; nearest: steps"),
        ("list envz", "teams, recipes; nearest: envs"),
        ("list os:environ", "no registry 'os:environ'; there are: orchestras"),
        (
            "run demo_math trainer.steps = 3",
            "no target '='; write an override as KEY=VALUE, without spaces",
        ),
        (
            "run demo_math --step 3",
            "unrecognized arguments: --step; a setting of a run has no dashes: `mcore-mas run SUITE "
            "trainer.steps=...`; `mcore-mas run --help`",
        ),
        (
            "run demo_math --dry-rn",
            "unrecognized arguments: --dry-rn; nearest: --dry-run, --dryrun; ",
        ),
        ("run demo_math --configdir x", "unrecognized arguments: --configdir; "),
        ("ui --store sqlite:///{missing}", "missing: no such file; no run has been tracked yet"),
        (
            "studio --port {port}",
            ": Address already in use; choose another --port, 0 for a free one",
        ),
        (
            "studio --host 192.0.2.1",
            "host 192.0.2.1 is not loopback; bind 127.0.0.1, or give --token-file",
        ),
    ],
)
def test_an_error_is_one_line(
    arguments: str,
    message: str,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call_command: CallCommand,
) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    scores = tmp_path / "scores.json"
    scores.mkdir()
    monkeypatch.chdir(project)
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        names = {
            "folder": tmp_path,
            "missing": tmp_path / "missing",
            "scores": scores,
            "text": text,
            "port": port,
        }
        result = call_command(*arguments.format(**names).split())
    assert result.status == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert "Error: " not in result.stderr  # no name of a Python type


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "trian",
            "No such command 'trian'. Did you mean 'train', 'track'; `mcore-mas --help` says",
        ),
        ("show", "Missing argument 'file'; `mcore-mas show --help` says"),
        ("train --adpt", "No such option: --adpt"),
        (
            "show demo_math --html",
            "Option '--html' requires an argument; `mcore-mas show --help` says",
        ),
        (
            "studio --port 99999",
            "Invalid value for '--port': Input should be less than or equal to 65535; `",
        ),
        ("help nothing", "No such command 'nothing'; `mcore-mas --help` says"),
    ],
)
def test_wrong_arguments_name_the_help(
    arguments: str, message: str, call_command: CallCommand
) -> None:
    result = call_command(*arguments.split())
    assert result.status == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["check --help", "check -h", "help check"])
def test_help(arguments: str, call_command: CallCommand) -> None:
    result = call_command(*arguments.split())
    assert result.status == 0
    assert "Usage: mcore-mas check" in result.stdout
    assert result.stderr == ""


def test_the_page_of_commands_has_every_command() -> None:
    page = (Path(__file__).parents[3] / "docs" / "commands.md").read_text(encoding="utf-8")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in commands if not re.search(rf"`(mcore-mas )?{name}[ `]", page)] == []


def test_a_call_without_arguments_prints_the_help(call_command: CallCommand) -> None:
    result = call_command()
    assert result.status == 2
    assert "Usage: mcore-mas" in result.stdout + result.stderr
    assert "error:" not in result.stderr


def test_debug_raises_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_mas.cli.main import main
    from rollout.base.ownership import FolderError

    monkeypatch.setattr("sys.argv", ["mcore-mas", "chat", "nothing", "--debug"])
    with pytest.raises(FolderError):
        main()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"rows": []}', "it has no tasks"),
        ("null", "it is not a JSON object"),
        ("[" * 200_000, "brackets are nested too deeply"),
        ("", "Expecting value"),
        ('{"tasks": [], "sha256": "0"}', "its content has changed since it was written"),
    ],
)
def test_a_damaged_evaluation_is_named(
    content: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call_command: CallCommand,
) -> None:
    for run in ("a", "b"):
        file = tmp_path / run / "evaluation" / "trained.json"
        file.parent.mkdir(parents=True)
        file.write_text(content)
        (tmp_path / run / "config.yaml").write_text(f"run: {run}")
    monkeypatch.chdir(tmp_path)

    result = call_command("compare", "a", "b")
    assert result.status == 1
    assert f"error: a/evaluation/trained.json: damaged ({reason}" in result.stderr
    assert "; remove it and have it made" in result.stderr

    if "rows" not in content:  # `ls` reads no tasks
        result = call_command("ls", ".")
        assert result.status == 1
        for run in ("a", "b"):
            assert f"{run}: {run}/evaluation/trained.json: damaged ({reason}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ("check demo_math --steps 3", "trainer.steps"),
        ("evaluate demo_math --k 8", "evaluation.samples"),
    ],
)
def test_a_setting_that_is_written_as_an_option_is_named(
    arguments: str,
    setting: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    call_command: CallCommand,
) -> None:
    monkeypatch.chdir(project)
    result = call_command(*arguments.split())
    assert result.status == 2
    assert result.stderr.startswith(f"error: No such option: {arguments.split()[2]}")
    hint = f"; a setting of a run has no dashes: `mcore-mas run SUITE {setting}=...`; `mcore-mas "
    assert hint in result.stderr
    assert result.stderr.count("\n") == 1
