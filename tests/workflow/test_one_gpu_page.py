"""The commands of docs/one_gpu.md, as far as a machine without a GPU runs them: plan, check and dry run."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline import check
from mcore_mas.pipeline.suite import load_suite
from mcore_mas.planning.estimate import (
    estimate_host_memory,
    estimate_peak_memory,
    load_architectures,
)
from mcore_mas.planning.gpus import Cluster, PlanError
from mcore_mas.planning.jobs import job_needs
from mcore_mas.planning.place import place_run
from mcore_mas.planning.shared_pool import fit_pool
from rollout.models.published_shapes import published_shapes

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "own_team.md", ROOT / "docs" / "one_gpu.md")
PAGE = PAGES[1].read_text(encoding="utf-8")
GPUS = ("1xL4", "1xA100-40GB", "1xH100")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files of both pages into the working folder, and return it."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for body in re.findall(r"```(?:python|yaml)\n(.*?)```", text, flags=re.DOTALL):
            name = re.search(r"^# (\S+\.(?:py|yaml))$", body, flags=re.MULTILINE)
            if name:
                file = tmp_path / name[1]
                file.parent.mkdir(exist_ok=True, parents=True)
                file.write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SGLANG_PYTHON", raising=False)
    return tmp_path


@pytest.fixture
def node(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the project on a stand-in of a machine with one GPU, SGLang and the downloaded model."""
    folder = project / "models" / "Qwen2.5-0.5B-Instruct"
    shutil.copytree(ROOT / "mcore_mas/pipeline/scaffold/models/tiny", folder)  # its tokenizer
    table = published_shapes()
    shape = dict(zip(table["columns"], table["models"]["Qwen2.5-0.5B"], strict=True))
    (folder / "config.json").write_text(json.dumps(shape))
    save_file({"model.norm.weight": torch.zeros(896)}, folder / "model.safetensors")
    for file in (project / "configs" / "experiment").iterdir():
        file.write_text(file.read_text().replace("/models/", f"{project}/models/"))

    for program in ("bin/python", "cuda/bin/nvcc", "bin/c++"):
        path = project / "sglang" / program
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setenv("SGLANG_PYTHON", str(project / "sglang/bin/python"))
    monkeypatch.setattr(check, "count_visible_gpus", lambda: 1)
    return project


def test_the_plan_is_the_one_that_the_page_shows(project: Path) -> None:
    [(command, output)] = re.findall(
        r"```\n\$ mcore-mas (plan one_gpu.yaml)\n(.*?)```", PAGE, re.DOTALL
    )
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert result.output == output


def test_the_seconds_of_a_step_follow_from_the_measured_speed() -> None:
    """The page's estimate has the tokens of its plan, and the tokens/s of docs/gpu.md."""
    measured = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    speeds = {}
    for row in re.findall(
        r"^\| ([\w.]+b) \| (\w+) \| groups \| .* \| (\d+) \|$", measured, re.MULTILINE
    ):
        model, recompute, tokens_per_s = row
        speeds[model, recompute] = int(tokens_per_s)
    section = PAGE.partition("## How long a step takes")[2].partition("\n## ")[0]
    for case in (("0.5b", "none"), ("1.7b", "none"), ("4b", "full")):
        assert f"{speeds[case]:,}" in section

    (tokens,) = re.findall(r"a step trains ([\d.]+) M tokens", PAGE)
    assert f"has {tokens} M tokens" in section
    seconds = {model: float(tokens) * 1e6 / speeds[model, "none"] for model in ("0.5b", "1.7b")}
    assert (
        f"updates take {seconds['0.5b']:.0f} s; Qwen3-1.7B would take {seconds['1.7b']:.0f} s"
        in (" ".join(section.split()))
    )


def test_the_suite_of_qwen3_trains_without_thinking(project: Path) -> None:
    config = load_suite("one_gpu_qwen3.yaml").run_config("one_gpu_qwen3")
    assert set(config.policies) == {"solver", "verifier"}
    for policy in config.policies.values():
        assert policy.chat_template_kwargs == {"enable_thinking": False}
    assert "does not fit" not in plan_cell(config, "1xH100")


def plan_cell(config: RunConfig, gpus: str) -> str:
    """Return the cell of the page's table for a run on a GPU."""
    cluster = Cluster.parse(gpus)
    try:
        placed = place_run(config, cluster)
    except PlanError:
        return "does not fit"
    models = load_architectures(placed)
    peak = estimate_peak_memory(placed, models, cluster.gpu)
    cell = [f"{max(peak.update, peak.rollout) / 1e9:.0f}"]
    cell.append(f"host {estimate_host_memory(placed, models) / 1e9:.0f}")
    if placed.policies["solver"].recompute != "none":
        cell.append(str(placed.policies["solver"].recompute))
    if placed.cluster.one_by_one:
        cell.append("one by one")
    return ", ".join(cell)


def table_row(values: dict[str, Any], model: str, trained: str) -> list[str]:
    """Return the cells of the page's table for a model of which all weights or adapters are trained."""
    changed = copy.deepcopy(values)
    for policy in changed["policies"].values():
        policy["model"] = f"/models/{model}"
        if trained == "LoRA":
            policy["lora"] = {"rank": 16, "alpha": 32}
    config = RunConfig.from_values(changed, "a test")
    return [plan_cell(config, gpus) for gpus in GPUS]


def test_the_table_of_smaller_gpus_is_planned(project: Path) -> None:
    overrides = ["experiment=my_math", "engine=sglang", "policy_defaults.bf16=true"]
    values = resolve(overrides, project / "configs")
    rows = re.findall(r"^\| (Qwen\S+) \| ([^|]+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for model, trained, cells in rows:
        assert cells.split(" | ") == table_row(values, model, trained), (model, trained)
    override = "policy_defaults.lora={rank: 16, alpha: 32}"
    resolve([*overrides, override], project / "configs")
    assert override in PAGE


def test_the_check_and_the_jobs_of_every_suite(node: Path) -> None:
    for suite in ("one_gpu", "one_gpu_embedded"):
        result = CliRunner().invoke(app, ["check", f"{suite}.yaml"])
        assert (result.exit_code, result.output) == (0, f"ok: {suite}\n")
        config = load_suite(f"{suite}.yaml").run_config(suite)
        assert config.cluster.pool == "shared"
        assert config.engine.sleep
        for stage in ("train", "evaluate"):  # one node with one GPU does every job
            needs = job_needs(config, stage, 1)
            assert (needs.nodes, needs.gpus) == (1, 1)


@pytest.mark.usefixtures("node")
def test_a_plan_for_a_larger_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    def check_with(mebibytes: int) -> str:
        program.write_text(f"#!/bin/sh\necho {mebibytes}\n")
        program.chmod(0o755)
        return CliRunner().invoke(app, ["check", "one_gpu.yaml"]).output

    assert check_with(81_559) == "ok: one_gpu\n"  # an H100
    rtx_4090 = check_with(24_564)
    assert "cluster.gpus: 1xH100 has 80 GB of memory, and a GPU of this machine has 25.8 GB" in (
        rtx_4090
    )


def test_a_run_of_own_team_without_a_plan_shares_the_gpu(project: Path) -> None:
    """The config asks for four GPUs; one shared GPU suffices, on this machine and under Slurm."""
    values = resolve(["experiment=my_math"], project / "configs")
    config = RunConfig.from_values(values, "a test")
    shared, line = fit_pool(config, 1)
    assert f"```\n{line}\n```" in PAGE
    assert (shared.cluster.pool, shared.engine.device) == ("shared", "auto")
    for stage in ("train", "evaluate"):
        needs = job_needs(config, stage, 1)
        assert (needs.nodes, needs.gpus) == (1, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs", "node")
def test_the_dry_run_lists_the_jobs() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mcore_mas", "run", "one_gpu.yaml", "-n"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for rule in ("train", "evaluate", "make_table"):
        assert re.search(rf"^(rule )?{rule}\b", result.stdout + result.stderr, re.MULTILINE), rule
