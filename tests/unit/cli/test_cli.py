"""Every wrong call of a command is said in one line, with an exit status that is not 0."""

import re
from pathlib import Path

import pytest

from mcore_mas.cli.inspection import REGISTRIES
from mcore_mas.cli.main import main, snakemake_command
from mcore_mas.pipeline.base_model import new_project
from rollout.base.http_server import bind
from rollout.base.lookup import entry_points_of
from rollout.records.files import write_trajectories
from tests.support.finished import finished
from tests.support.played import trajectory, turn


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a suite and two runs."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_suite.yaml").touch()
    for number, run in enumerate(("demo_math", "demo_math2")):
        finished(folder / "results", run, number)
        write_trajectories(
            folder / f"results/{run}/train/trajectories/step_000000.parquet", [trajectory(turn(0))]
        )
    return folder


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["mcore-mas", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "train {missing}.yaml",
            "missing.yaml: no run here; expected a run's folder, its name in results/, or its config.yaml",
        ),
        ("train {text}", "text: str, where a config is a mapping; name another file"),
        (
            "evaluate demo_math --state trainde",
            "--state trainde with 0 seats; expected base or trained without",
        ),
        (
            "evaluate demo_math --state x --seat verifier",
            "--seat verifier: expected AGENT=WHO, for example",
        ),
        ("evaluate {missing}.yaml", "missing.yaml: no run here; expected a run's folder"),
        (
            "export {missing} solver --to x",
            "missing: no run here; expected a run's folder, its name in results/",
        ),
        (
            "chat demo_mth",
            "demo_mth: no run here; expected a run's folder, its name in results/, or its config.yaml; n",
        ),
        ("serve demo_mth", "; nearest: demo_math, demo_math2"),
        ("compare demo_math demo_mat", "; nearest: demo_math, demo_math2"),
        (
            "export demo_math solvr --to x",
            "no policy 'solvr'; policies: solver, verifier; nearest: solver",
        ),
        (
            "show demo_mth",
            "demo_mth: no such file or run; expected a parquet file of trajectories, or a run; nearest: d",
        ),
        (
            "check my_suit.yaml",
            "my_suit.yaml: no such file, and no experiment of this name (",
        ),
        (
            "show {missing}",
            "missing: no such file or run; expected a parquet file of trajectories, or a run",
        ),
        ("show {folder}", ": no trajectories here; a run that was not trained has none"),
        ("show {text}", "text: not a readable parquet file"),
        ("explain {missing}", "missing: no such file or run; expected a parquet file"),
        (
            "explain {text} --option lone",
            "--option lone: expected key=value, for example --option lone=raw",
        ),
        ("leaks", "name data files to compare, or --config with a resolved config"),
        ("leaks {missing}", "missing: no such file"),
        ("train {folder}", ": no run here; expected a run's folder"),
        ("check demo_mat", "/docs/experiments.md); nearest: demo_math"),
        ("check demo_math trainer.stepz=3", "trainer.stepz: unknown key; nearest: steps"),
        ("list envz", "teams, recipes; nearest: envs"),
        (
            "run demo_math foo",
            "no target 'foo'; expected a file such as results/RUN/train/done.json, a rule, or KEY=",
        ),
        ("run demo_math study_stabilty", "; nearest: study_stability"),
        (
            "run demo_math trainer.steps = 3",
            "no target 'trainer.steps'; expected a file such as results/RUN/train/done.json, a rule, or KEY=",
        ),
        ("run demo_math --configdir x", "unrecognized arguments: --configdir; "),
        ("list os:environ", "no registry 'os:environ'; there are: orchestras"),
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
def test_a_mistake_is_one_line(
    arguments: str,
    words: str,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "text").write_text("hello")
    monkeypatch.chdir(project)
    places = {"folder": tmp_path, **{name: tmp_path / name for name in ("missing", "text")}}
    with bind("127.0.0.1", 0) as taken:
        words_given = arguments.format(**places, port=taken.getsockname()[1]).split()
        assert called(monkeypatch, *words_given) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert words in said
    assert "Error: " not in said.removeprefix("error: ")  # no name of a Python type


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "trian",
            "No such command 'trian'. Did you mean 'train', 'track'; `mcore-mas --help` says",
        ),
        ("list", "Missing argument 'registry'; `mcore-mas list --help` says"),
        ("train --adpt", "No such option: --adpt"),
        (
            "studio --port 99999",
            "Invalid value for '--port': Input should be less than or equal to 65535; `",
        ),
        ("help nothing", "No such command 'nothing'; `mcore-mas --help` says"),
    ],
)
def test_a_call_that_does_not_parse_says_how_to_get_help(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert called(monkeypatch, *arguments.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {words}") and said.count("\n") == 1


@pytest.mark.parametrize("arguments", ["--help", "-h", "help", ""])
def test_help_is_there_however_it_is_asked_for(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asked = {"": "", "help": "help check"}.get(arguments, f"check {arguments}")
    assert called(monkeypatch, *asked.split()) == (0 if arguments else 2)
    out, err = capsys.readouterr()
    assert "Usage: mcore-mas" in out + err and "error" not in err


def test_every_registry_is_listed_and_the_readme_names_them_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    (row,) = (line for line in readme.splitlines() if line.startswith("| `mcore-mas list"))
    assert re.findall(r"`(\w+)`", row) == list(REGISTRIES)
    for registry in REGISTRIES:
        assert called(monkeypatch, "list", registry) == 0
        names = capsys.readouterr().out.splitlines()
        assert names == sorted(names) and len(names) > 1, registry


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("advantage", "drmas"),
        ("reward.name", "shared_outcome"),
        ("rewards", "majority"),
        ("data.generator", "arithmetic"),
        ("loss", "ppo_clip"),
        ("agents.solver.role", "solver"),
        ("agent.tools", "calculator"),
        ("provider", "openai"),
        ("penalty", "invalid"),
        ("experiment", "demo_math_lora"),
        ("team", "solver_verifier"),
        ("recipe", "grpo"),
    ],
)
def test_a_registry_is_known_by_the_key_of_a_config(
    key: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert called(monkeypatch, "list", key) == 0
    assert name in capsys.readouterr().out.splitlines()


def test_ones_own_experiments_and_teams_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(new_project("poets", tmp_path))
    for registry in ("experiments", "teams"):
        assert called(monkeypatch, "list", registry) == 0
        assert "poets" in capsys.readouterr().out.splitlines()


def test_names_of_installed_packages_are_listed_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    told = tmp_path / "theirs-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (told / "entry_points.txt").write_text("[mcore_mas.env]\nchess = theirs:Chess\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry_points_of.cache_clear()
    try:
        assert called(monkeypatch, "list", "envs") == 0
        assert "chess  (of theirs)" in capsys.readouterr().out.splitlines()
        assert called(monkeypatch, "list", "losses") == 0
        assert "(of" not in capsys.readouterr().out
    finally:
        entry_points_of.cache_clear()


def test_a_suite_is_run_with_overrides_and_one_config(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("{suite: s, experiments: {a: [experiment=demo_math]}, overrides: [seed=3]}")
    _, _, _, *said = snakemake_command(
        str(file), ["a.b=1", "~c", "x/y.json", "--config", "scale=tiny", "-n"], tmp_path
    )
    own = ['overrides=["seed=3", "a.b=1", "~c"]', f"config_dir={tmp_path.resolve()}"]
    assert said[2:] == [f"--configfile={file}", "x/y.json", "--config", *own, "scale=tiny", "-n"]
    assert snakemake_command(str(file), ["-n"], None)[5:] == [f"--configfile={file}", "-n"]
    after = [
        "-n",
        "a.b=1",
        "--cores",
        "2",
        "~c",
        "--config",
        "scale=tiny",
        "x/y=1.json",
        "--quiet",
        "rules",
        "+d=2",
    ]
    kept = [
        "-n",
        "--cores",
        "2",
        "--config",
        'overrides=["seed=3", "a.b=1", "~c", "+d=2"]',
        "scale=tiny",
    ]
    assert snakemake_command(str(file), after, None)[6:] == [
        *kept,
        "x/y=1.json",
        "--quiet",
        "rules",
    ]
    by_name = snakemake_command("demo_math", ["-n"], None)[5:]
    assert by_name == [
        "-n",
        "--config",
        'suite="demo_math"',
        'experiments={"demo_math": ["experiment=demo_math"]}',
    ]


def test_a_run_that_was_not_trained_has_nothing_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "my_team").mkdir()  # the code, beside which there are no results yet
    (tmp_path / "results" / "other" / "tasks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for named in ("my_team", "other", "results/other"):
        assert called(monkeypatch, "show", named) == 1
        assert (
            f"error: {named}: no trajectories here; a run that was not trained has none"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"rows": []}', "it has no tasks"),
        ("null", "'NoneType' object has no attribute 'get'"),
        ("[" * 200_000, "too many brackets in each other"),
        ("", "Expecting value"),
        ('{"tasks": [], "sha256": "0"}', "it is not what was written"),
    ],
)
def test_a_damaged_evaluation_is_named(
    content: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    for run in ("a", "b"):
        file = tmp_path / run / "evaluation" / "trained.json"
        file.parent.mkdir(parents=True)
        file.write_text(content)
        (tmp_path / run / "config.yaml").write_text(f"run: {run}")
    monkeypatch.chdir(tmp_path)
    for command in (["compare", "a", "b"], *([["ls", "."]] if "rows" not in content else [])):
        assert called(monkeypatch, *command) == 1
        said = capsys.readouterr().err
        assert (
            f"error: a/evaluation/trained.json: damaged ({why}" in said
            and "; remove it and have it made" in said
        )


def test_a_run_stands_for_the_trajectories_of_its_newest_step(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = project / "results/demo_math/train/trajectories/step_000001.parquet"
    write_trajectories(file, [trajectory(turn(0), task_id="newest")])
    monkeypatch.chdir(project)
    for named in ("demo_math", "results/demo_math", str(file)):
        assert called(monkeypatch, "show", named) == 0
        assert "task newest" in capsys.readouterr().out
    assert (
        called(monkeypatch, "show", "results/demo_math/train/trajectories/step_000000.parquet") == 0
    )
    assert "task newest" not in capsys.readouterr().out
