"""Projects that `mcore-mas new` writes: their tests pass, their configs compose, and their teams learn."""

from __future__ import annotations

import json
import os
import re
import resource
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mcore_mas.pipeline.project import ProjectError, new_project
from tests.support.played import failed, group, rewards, trajectory, turn
from tests.support.run_folder import metrics_of

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_project("poets", tmp_path_factory.mktemp("home"))


def run_module(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ARGUMENTS` in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_tests_of_a_project_pass_and_its_suite_plans(project: Path) -> None:
    assert not [file for file in project.rglob("*") if "my_team" in file.name]
    tests = run_module(project, "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert tests.returncode == 0, tests.stdout
    assert "4 passed" in tests.stdout, tests.stdout
    check = run_module(project, "mcore_mas", "check", "poets.yaml")
    assert check.returncode == 0
    assert check.stdout == "ok: poets\n"
    dry_run = run_module(
        project,
        "mcore_mas",
        "run",
        "poets.yaml",
        "trainer.steps=2",
        "--dry-run",
        "--quiet",
        "rules",
    )
    assert dry_run.returncode == 0, dry_run.stderr
    assert not (project / "results").exists()


@pytest.mark.slow
def test_three_lines_of_the_page_cluster_move_a_project_to_gpus(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    section = page.partition("## From a laptop to Slurm\n")[2].partition("\n## ")[0]
    (lines,) = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    project = new_project("my_team", tmp_path)
    file = project / "configs" / "experiment" / "my_team.yaml"
    other_lines = [
        line
        for line in file.read_text().splitlines()
        if line.partition(":")[0] not in ("policy_defaults", "engine")
    ]
    file.write_text("\n".join([*other_lines, lines]))
    check = run_module(project, "mcore_mas", "check", "my_team.yaml")
    assert check.returncode == 1
    assert check.stdout.startswith("error: run 'my_team': policies.shared: /shared/models/Qwen")
    plan = run_module(project, "mcore_mas", "plan", "my_team.yaml", "--gpus", "4xH100")
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.startswith("my_team on 4xH100: "), plan.stderr


# Edits of ten lines of a project: other tasks, scores, prompts, token prices and reply lengths
EDITS = {
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


@pytest.mark.slow
@pytest.mark.multirank
def test_a_project_with_ten_edited_lines_is_another_team_that_learns(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--documents"):
        pytest.skip("takes a minute; `make test-documents` runs it")
    project = new_project("poets", tmp_path)
    edited_lines = 0
    for name, edits in EDITS.items():
        file = project / name
        old_lines = file.read_text().splitlines()
        for old, new in edits:
            assert file.read_text().count(old) == 1, (name, old)
            file.write_text(file.read_text().replace(old, new))
        new_lines = file.read_text().splitlines()
        edited_lines += sum(old != new for old, new in zip(old_lines, new_lines, strict=True))
    assert edited_lines == 10
    assert run_module(project, "mcore_mas", "check", "poets.yaml").stdout == "ok: poets\n"
    target = "results/poets/train/done.json"
    training = run_module(project, "mcore_mas", "run", "poets.yaml", target, "--quiet", "all")
    assert training.returncode == 0, training.stderr[-4000:]

    rows = metrics_of(project / "results/poets")
    accuracies = validation_curve(rows, "accuracy")
    valid_ratios = validation_curve(rows, "valid_ratio")
    print(f"validation every ten steps: {', '.join(f'{value:.2f}' for value in accuracies)}")
    print(f"valid replies: {', '.join(f'{value:.2f}' for value in valid_ratios)}")
    assert len(accuracies) == 5
    assert accuracies[0] < 0.3
    assert accuracies[-1] > 0.45  # between 0.58 and 0.75 in three runs
    # A valid reply ends before its limit of tokens.
    assert valid_ratios[0] < 0.8
    assert valid_ratios[-1] > 0.8


def validation_curve(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Return a metric of the validations in their order."""
    return [row[f"validation/{name}"] for row in rows if f"validation/{name}" in row]


def test_an_invalid_reply_pays_for_its_tokens_and_earns_nothing(project: Path) -> None:
    brief = runpy.run_path(str(project / "poets" / "reward.py"))["brief"]
    eight_tokens = {"completion_ids": (1,) * 8, "logprobs": (0.0,) * 8}
    trajectories = group(
        # The valid turn of one token earns 1 - 0.01, the invalid one of eight tokens 0 - 0.08.
        trajectory(turn(0), turn(1, valid=False, **eight_tokens)),
        trajectory(turn(0), outcome=0.0),
        failed(turn(0)),
    )
    assert rewards(brief(trajectories, price=0.01)) == [[0.99, -0.08], [-0.01], [None]]


def test_the_model_of_a_project_is_the_one_that_make_tiny_model_makes(
    project: Path, tmp_path: Path
) -> None:
    # A process of its own has no roles of other tests, on which the tokenizer would depend.
    expected = tmp_path / "tiny"
    program = "import sys; from mcore_mas.pipeline.base_model import make_tiny_model as make; make(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, expected], check=True)
    model = project / "models" / "tiny"
    names = sorted(file.name for file in model.iterdir())
    assert names == sorted(file.name for file in expected.iterdir())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (model / name).read_text() == (expected / name).read_text()
    for name in ("config.json", "generation_config.json"):
        config = json.loads((model / name).read_text())
        expected_config = json.loads((expected / name).read_text())
        config["transformers_version"] = expected_config["transformers_version"]
        assert config == expected_config
    weights = load_file(model / "model.safetensors")
    expected_weights = load_file(expected / "model.safetensors")
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        # Processors of different kinds round differently.
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=1e-6)


def test_the_files_of_a_project_name_the_installed_schemas(project: Path) -> None:
    """Editors check the files with these schemas."""
    files = sorted(project.rglob("*.yaml"))
    assert len(files) == 3
    for file in files:
        text = file.read_text()
        assert text.startswith("# yaml-language-server")
        (schema_path,) = re.findall(r"^# yaml-language-server: \$schema=(/.*)$", text, re.MULTILINE)
        schema = json.loads(Path(schema_path).read_text())
        unknown_keys = yaml.safe_load(text).keys() - schema["properties"].keys() - {"defaults"}
        assert not unknown_keys


def test_a_name_that_cannot_be_a_new_package_is_refused(project: Path) -> None:
    before = sorted(project.parent.iterdir())
    for name in ("my-team", "class", "../x", "", "équipe", "_x", "null", "on", "nan", "x" * 101):
        with pytest.raises(ProjectError, match="cannot be a Python package"):
            new_project(name, project.parent)
    for name in ("random", "torch", "yaml", "json", "test", "mcore_mas"):
        message = f"'{name}' is a Python module that is installed here; .* my_{name}$"
        with pytest.raises(ProjectError, match=message):
            new_project(name, project.parent)
    for name in ("models", "configs", "tests", "results"):
        message = f"'{name}' is one of a project's own folders; .* my_{name}$"
        with pytest.raises(ProjectError, match=message):
            new_project(name, project.parent)
    assert sorted(project.parent.iterdir()) == before
    with pytest.raises(ProjectError, match="something is there already"):
        new_project("poets", project.parent)
    message = r"/proc/painters: cannot be written \(No such file.*\); change to a folder"
    with pytest.raises(ProjectError, match=message):
        new_project("painters", Path("/proc"))


def test_a_project_that_cannot_be_written_completely_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "painters").mkdir()  # a project may be written into an empty folder
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # the model's files are larger
    try:
        with pytest.raises(ProjectError, match=r"painters: cannot be written \("):
            new_project("painters", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.rglob("*")) == [tmp_path / "painters"]
    assert (new_project("painters", tmp_path) / "painters.yaml").is_file()
