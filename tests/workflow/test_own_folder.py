"""The team of docs/own_team.md, in an empty folder, with the package installed: found, refused if mistyped, trained."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from mcore_mas.cli.suite_command import snakemake_command
from mcore_mas.pipeline.base_model import make_tiny_model
from mcore_mas.pipeline.suite import Suite, load_suite
from mcore_mas.pipeline.suite_file import SuiteError
from rollout.teams.roles import ROLES
from tests.support.run_folder import make_run

ROOT = Path(__file__).parents[2]
SOURCES = ("mcore_mas", "rollout", "retrieval", "configs", "workflow")
SMALL = [
    "data={train: 4, validation: 2, test: 2}",
    "engine={max_length: 512, slots: 8}",
    "trainer={steps: 2, tasks_per_step: 2, group_size: 2, microbatch_tokens: 512, checkpoint_every: 2}",
    "agents={drafter: {max_tokens: 8}, editor: {max_tokens: 8}}",
    "evaluation.samples=1",
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as pip installs it from a wheel."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for folder in SOURCES:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (source / "docs").mkdir()
    for file in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "docs/published.yaml",
        "docs/tables.md",
    ):
        shutil.copy(ROOT / file, source / file)
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", site, source], check=True
    )
    return site


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with nothing but the page's files."""
    text = (ROOT / "docs" / "own_team.md").read_text(encoding="utf-8")
    for body in re.findall(r"```(?:python|yaml)\n(.*?)```", text, flags=re.DOTALL):
        place = re.search(r"^# (\S+\.(?:py|yaml))$", body, flags=re.MULTILINE)
        if place:
            path = tmp_path / "project" / place[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
    return tmp_path / "project"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import paths, modules and roles as they were before and will be after."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    roles = dict(ROLES)
    yield
    ROLES.clear()
    ROLES.update(roles)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_pkg"]:
        del sys.modules[name]


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`mcore-mas run` of the installed package in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mcore_mas", "run", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.multirank
def test_the_team_of_the_readme_trains_where_nothing_else_is(
    installed: Path, project: Path, tmp_path: Path
) -> None:
    model = make_run(tmp_path) / "base"
    suite = {
        "suite": "own",
        "experiments": {"mine": ["experiment=my_relay", f"policy_defaults.model={model}", *SMALL]},
    }
    (project / "own.yaml").write_text(yaml.safe_dump(suite))
    done = run(installed, project, "own.yaml", "results/mine/train/done.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    config = yaml.safe_load((project / "results/mine/config.yaml").read_text())
    assert config["env"] == {"name": "my_pkg.worlds:near", "options": {"scale": 20}}
    assert {agent["policy"] for agent in config["agents"].values()} == {"shared"}
    table = pq.read_table(project / "results/mine/train/trajectories/step_000001.parquet")
    assert {turn["agent"] for turns in table["turns"].to_pylist() for turn in turns} == {
        "drafter",
        "editor",
    }


@pytest.mark.slow
def test_the_package_brings_its_types_pages_and_ranges(installed: Path) -> None:
    (told,) = installed.glob("mcore_mas-*.dist-info")
    metadata = (told / "METADATA").read_text(encoding="utf-8")
    assert "Description-Content-Type: text/markdown" in metadata and "\n# mcore-mas\n" in metadata
    assert "Requires-Dist: torch<3,>=" in metadata and "Provides-Extra: gpu" in metadata
    assert (installed / "mcore_mas" / "py.typed").is_file()
    assert not {"workflow", "configs"} & {path.name for path in installed.iterdir()}
    shipped = installed / "mcore_mas" / "shipped"
    for file in (
        "configs/schema/run.json",
        "configs/config.yaml",
        "workflow/Snakefile",
        "workflow/suites/demo.yaml",
    ):
        assert (shipped / file).is_file(), file
    code = "import mcore_mas; print(mcore_mas.resolve_page_paths('no (docs/tables.md, /a/docs/tables.md)'))"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=told, env=environment, capture_output=True, text=True
    )
    assert found.stdout == f"no ({shipped}/docs/tables.md, /a/docs/tables.md)\n", found.stderr
    assert (shipped / "docs/tables.md").is_file()
    code = "import mcore_mas, sys; from mcore_mas.config.experiments import experiments; print(len(experiments()))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=told, env=environment, capture_output=True, text=True
    )
    assert int(found.stdout) > 50, found.stderr


@pytest.mark.slow
def test_configs_may_lie_elsewhere_and_the_shipped_workflow_is_in_the_package(
    installed: Path, project: Path
) -> None:
    other = project.parent / "other"
    other.mkdir()
    for name in ("configs", "my_pkg"):
        (project / name).rename(other / name)
    make_tiny_model(project / "model")
    suite = "suite: own\nexperiments: {mine: [experiment=my_relay, policy_defaults.model=model]}\n"
    (project / "my_suite.yaml").write_text(suite)
    done = run(
        installed,
        project,
        "my_suite.yaml",
        "--config-dir",
        "../other/configs",
        "--dry-run",
        "--quiet",
        "rules",
    )
    assert done.returncode == 0, done.stderr
    assert (
        str(installed / "mcore_mas" / "shipped" / "workflow") in done.stderr
    )  # its default profile
    assert not (project / "results").exists()


def test_an_experiment_of_ones_own_is_found_by_its_name(
    project: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert load_suite("my_relay").runs["my_relay"]["env"]["name"] == "my_pkg.worlds:near"
    named = [
        word
        for word in snakemake_command("my_relay", ["-n"], None)
        if word.startswith("config_dir=")
    ]
    assert named == [f'config_dir="{project / "configs"}"']
    (project / "configs").rename(project / "mine")
    assert [*load_suite("my_relay", config_dir=Path("mine")).runs] == ["my_relay"]
    assert "my_relay" in load_suite("my_suite.yaml", config_dir=Path("mine")).runs
    for suite in ("my_relay", "my_suite.yaml"):
        for refused in (load_suite, snakemake_command):
            with pytest.raises(SuiteError, match=r"config_dir: .*/mien is not a folder"):
                refused(suite, [], Path("mien"))
    with pytest.raises(
        SuiteError,
        match=r"my_rely: no such file, and no experiment of this name .*; nearest: my_relay",
    ):
        load_suite("my_rely", config_dir=Path("mine"))


@pytest.mark.slow
def test_a_mistake_ends_the_command_with_one_line_before_any_job(
    installed: Path, project: Path
) -> None:
    change(project / "my_suite.yaml", "=my_relay", "=my_rely")
    done = run(installed, project, "my_suite.yaml")
    lines = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith("Using workflow specific profile")
    ]
    assert done.returncode != 0
    assert len(lines) == 1 and lines[0].startswith("error: run 'my_relay': "), lines
    assert not (project / "results").exists()


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "my_suite.yaml",
            "=my_relay",
            "=my_rely",
            "run 'my_relay': .*no experiment 'my_rely' in the configs; nearest",
        ),
        (
            "my_suite.yaml",
            "experiments:",
            "config_dir: cfg\nexperiments:",
            "config_dir: .*/cfg is not a folder",
        ),
        (
            "configs/experiment/my_relay.yaml",
            "steps:",
            "stepz:",
            "run 'my_relay': .*trainer.stepz: unknown key",
        ),
        (
            "configs/experiment/my_relay.yaml",
            "relay\n",
            "rely\n",
            "no team 'rely' in the configs; nearest: relay",
        ),
        ("configs/experiment/my_relay.yaml", "data: {", "data: [{", "not YAML .*my_relay.yaml"),
        (
            "configs/team/relay.yaml",
            "teams:relay",
            "teams:rely",
            "orchestra 'my_pkg.teams:rely' cannot be imported",
        ),
        ("configs/team/relay.yaml", "scale", "scales", "scales"),
        (
            "my_pkg/worlds.py",
            "scale: float = 10.0",
            "",
            "env 'my_pkg.worlds:near' cannot be imported",
        ),
    ],
)
def test_every_mistake_is_one_line(
    project: Path, fresh: None, file: str, old: str, new: str, message: str
) -> None:
    change(project / file, old, new)
    with pytest.raises(SuiteError, match=message) as caught:
        Suite.load(yaml.safe_load((project / "my_suite.yaml").read_text()), project)
    assert "\n" not in str(caught.value)


def change(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
