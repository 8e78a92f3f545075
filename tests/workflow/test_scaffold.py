"""A project that `mcore-mas new` writes passes its own test, composes, and plans."""

from __future__ import annotations

import json
import os
import re
import resource
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mcore_mas.pipeline.base_model import make_tiny_model
from mcore_mas.pipeline.project import ProjectError, new_project
from tests.support.played import failed, group, rewards, trajectory, turn

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_project("poets", tmp_path_factory.mktemp("home"))


def said(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_its_own_test_passes_and_its_suite_plans(project: Path) -> None:
    assert not [file for file in project.rglob("*") if "my_team" in file.name]
    tested = said(project, "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert tested.returncode == 0 and "4 passed" in tested.stdout, tested.stdout
    checked = said(project, "mcore_mas", "check", "poets.yaml")
    assert (checked.returncode, checked.stdout) == (0, "ok: poets\n")
    planned = said(
        project,
        "mcore_mas",
        "run",
        "poets.yaml",
        "trainer.steps=2",
        "--dry-run",
        "--quiet",
        "rules",
    )
    assert planned.returncode == 0, planned.stderr
    assert not (project / "results").exists()


@pytest.mark.slow
def test_the_clusters_page_moves_it_to_gpus_with_three_lines(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    section = page.partition("## From a laptop to Slurm\n")[2].partition("\n## ")[0]
    (lines,) = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    project = new_project("my_team", tmp_path)
    file = project / "configs" / "experiment" / "my_team.yaml"
    kept = [
        line
        for line in file.read_text().splitlines()
        if line.partition(":")[0] not in ("policy_defaults", "engine")
    ]
    file.write_text("\n".join([*kept, lines]))
    checked = said(project, "mcore_mas", "check", "my_team.yaml")
    assert checked.returncode == 1 and checked.stdout.startswith(
        "no: run 'my_team': policies.shared: /shared/models/Qwen"
    )
    planned = said(project, "mcore_mas", "plan", "my_team.yaml", "--gpus", "4xH100")
    assert planned.returncode == 0 and planned.stdout.startswith("my_team on 4xH100: "), (
        planned.stderr
    )


EDITS = {  # ten lines of a project: other tasks, another answer that counts, other prompts, prices and room
    "poets/tasks.py": (
        ("Write words with {'ae'[n % 2]}", "Sing of {'io'[n % 2]}"),
        ('("ae"[n % 2],)', '("io"[n % 2],)'),
    ),
    "poets/world.py": (
        ("action.split()", "action.lower().split()"),
        ("word in words)", "word in words if len(word) < 12)"),
    ),
    "poets/team.py": (
        ('user="{problem}")', 'user="{problem} Go.")'),
        ('"{problem} {draft}")', '"{draft} {problem}")'),
    ),
    "poets/reward.py": (("price: float = 0.001", "price: float = 0.002"),),
    "configs/team/poets.yaml": (
        ("writer: {max_tokens: 8}", "writer: {max_tokens: 6}"),
        ("editor: {max_tokens: 8}", "editor: {max_tokens: 6}"),
    ),
    "configs/experiment/poets.yaml": (("train: 200", "train: 160"),),
}


MEASURED = ("accuracy", "valid_ratio")


@pytest.mark.slow
@pytest.mark.multirank
def test_ten_edited_lines_are_another_team_that_learns(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--documents"):
        pytest.skip("takes a minute; `make test-documents` runs it")
    project, edited = new_project("poets", tmp_path), 0
    for name, edits in EDITS.items():
        file = project / name
        before = file.read_text().splitlines()
        for old, new in edits:
            assert file.read_text().count(old) == 1, (name, old)
            file.write_text(file.read_text().replace(old, new))
        edited += sum(a != b for a, b in zip(before, file.read_text().splitlines(), strict=True))
    assert edited == 10
    assert said(project, "mcore_mas", "check", "poets.yaml").stdout == "ok: poets\n"
    done = said(
        project, "mcore_mas", "run", "poets.yaml", "results/poets/train/done.json", "--quiet", "all"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [
        json.loads(line)
        for line in (project / "results/poets/train/metrics.jsonl").read_text().splitlines()
    ]
    curve, valid = (
        [row[f"validation/{name}"] for row in rows if f"validation/{name}" in row]
        for name in MEASURED
    )
    print(f"validation every ten steps: {', '.join(f'{value:.2f}' for value in curve)}")
    print(f"valid replies: {', '.join(f'{value:.2f}' for value in valid)}")
    assert len(curve) == 5 and curve[0] < 0.3 and curve[-1] > 0.45  # 0.58 to 0.75 in three runs
    assert valid[-1] > 0.8 > valid[0]  # replies end by themselves


def test_a_malformed_reply_pays_for_its_tokens_and_earns_nothing(project: Path) -> None:
    brief = runpy.run_path(str(project / "poets" / "reward.py"))["brief"]
    long = {"completion_ids": (1,) * 8, "logprobs": (0.0,) * 8}
    played = group(
        trajectory(turn(0), turn(1, valid=False, **long)),
        trajectory(turn(0), outcome=0.0),
        failed(turn(0)),
    )
    # by hand: outcome 1 less 1 token, none of it less 8 tokens, outcome 0 less 1 token; a failed one does not train
    assert rewards(brief(played, price=0.01)) == [[0.99, -0.08], [-0.01], [None]]


def test_its_model_is_what_makes_models_from_nothing(project: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny")
    ours, made = project / "models" / "tiny", tmp_path / "tiny"
    assert sorted(file.name for file in ours.iterdir()) == sorted(
        file.name for file in made.iterdir()
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (ours / name).read_text() == (made / name).read_text()
    for name in ("config.json", "generation_config.json"):
        own, other = (json.loads((folder / name).read_text()) for folder in (ours, made))
        assert {**own, "transformers_version": other["transformers_version"]} == other
    weights, others = (load_file(folder / "model.safetensors") for folder in (ours, made))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight, others[name], rtol=0, atol=1e-6
        )  # kinds of processors round differently


def test_an_editor_checks_its_files_by_the_schemas_that_are_installed(project: Path) -> None:
    files = sorted(project.rglob("*.yaml"))
    assert len(files) == 3
    for file in files:
        (named,) = re.findall(
            r"^# yaml-language-server: \$schema=(/.*)$", file.read_text(), re.MULTILINE
        )
        schema = json.loads(Path(named).read_text())
        unknown = (
            yaml.safe_load(file.read_text()).keys() - schema["properties"].keys() - {"defaults"}
        )
        assert file.read_text().startswith("# yaml-language-server") and not unknown


def test_a_name_that_is_no_package_or_is_taken_is_refused(project: Path) -> None:
    before = sorted(project.parent.iterdir())
    for name in ("my-team", "class", "../x", "", "équipe", "_x", "null", "on", "nan", "x" * 101):
        with pytest.raises(ProjectError, match="cannot be a Python package"):
            new_project(name, project.parent)
    for name in ("random", "torch", "yaml", "json", "test", "mcore_mas"):
        with pytest.raises(
            ProjectError,
            match=f"'{name}' is a Python module that is installed here; .* my_{name}$",
        ):
            new_project(name, project.parent)
    for name in ("models", "configs", "tests", "results"):
        with pytest.raises(
            ProjectError, match=f"'{name}' is one of a project's own folders; .* my_{name}$"
        ):
            new_project(name, project.parent)
    assert sorted(project.parent.iterdir()) == before
    with pytest.raises(ProjectError, match="something is there already"):
        new_project("poets", project.parent)
    with pytest.raises(
        ProjectError, match=r"/proc/painters: cannot be written \(No such file.*\); go to a folder"
    ):
        new_project("painters", Path("/proc"))


def test_a_project_whose_writing_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "painters").mkdir()  # empty: it may be filled
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # the model's files are larger
    try:
        with pytest.raises(ProjectError, match=r"painters: cannot be written \("):
            new_project("painters", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*tmp_path.rglob("*")] == [tmp_path / "painters"]
    assert (new_project("painters", tmp_path) / "painters.yaml").is_file()
