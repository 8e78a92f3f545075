"""The whole run of a GPU, played on a CPU with few steps."""

import json
import re
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import run_kit
from benchmarks.gpu.run_kit import PACKAGES, pack_run, pinned
from benchmarks.gpu.whole_run import NEEDS, SECTION_SECONDS, main, pack_logs, summary
from benchmarks.gpu.whole_run_sections import (
    KIT_ROOT,
    SECTIONS,
    Options,
    idle_gaps,
    merged,
    planned_peak_mib,
    set_value,
    write_run,
)
from mcore_mas.config.run import RunConfig
from tests.support.run_folder import make_run

# The sections, their trainings and evaluations start as forks.
pytestmark = pytest.mark.usefixtures("forked_programs")

KERNELS = [(0.0, 4.0, "a"), (2.0, 3.0, "b"), (3.0, 6.0, "c"), (9.0, 10.0, "d"), (10.5, 12.0, "e")]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit without packages, of a run whose model was not trained."""
    folder = tmp_path_factory.mktemp("kit")
    run = make_run(folder, "data.validation=2")
    (run / "bootstrap").mkdir()
    (run / "base").rename(run / "bootstrap" / "model")
    pack_run(run, folder / "demo")
    return folder


def test_overlapping_kernels_are_one_busy_time() -> None:
    assert list(merged(KERNELS)) == [(0.0, 6.0, "c"), (9.0, 10.0, "d"), (10.5, 12.0, "e")]


def test_gaps_name_the_kernels_around_them() -> None:
    gaps = idle_gaps(KERNELS)
    assert [(gap.microseconds, gap.after, gap.before) for gap in gaps] == [
        (3.0, "c", "d"),
        (0.5, "d", "e"),
    ]
    assert idle_gaps([]) == []


def test_a_star_sets_the_value_of_every_entry() -> None:
    config = {"policies": {"solver": {"lr": 1, "bf16": False}, "verifier": {"bf16": False}}}
    set_value(config, ["policies", "*", "bf16"], True)
    set_value(config, ["policies", "solver", "lr"], 2)
    assert config == {"policies": {"solver": {"lr": 2, "bf16": True}, "verifier": {"bf16": True}}}


def test_a_run_of_the_kit_is_complete_in_its_new_folder(kit: Path, tmp_path: Path) -> None:
    options = Options(kit=kit, work=tmp_path, device="cpu", small=True)
    run = write_run(options, "renamed", {"trainer.steps": 7})
    assert KIT_ROOT in (kit / "demo" / "config.yaml").read_text()
    assert KIT_ROOT not in (run / "config.yaml").read_text()
    config = RunConfig.load(run / "config.yaml")
    assert (config.run, config.folder, config.trainer.steps) == ("renamed", run, 7)
    assert config.policies["solver"].model == str(run / "bootstrap" / "model")
    assert (run / "tasks" / "train.parquet").is_file()
    assert config.cluster.pool == "shared"
    assert config.engine.sleep


def test_the_planned_peak_is_that_of_the_model_in_the_run(kit: Path, tmp_path: Path) -> None:
    options = Options(kit=kit, work=tmp_path, device="cpu", small=True)
    run = write_run(options, "planned", {"cold_start": None})
    small = planned_peak_mib(run)
    config_file = run / "bootstrap" / "model" / "config.json"
    model = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(model | {"vocab_size": 100 * model["vocab_size"]}))
    assert planned_peak_mib(run) > small > 0


def test_a_kit_that_cannot_be_carried_is_an_error(
    kit: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--run", str(kit / "demo"), "--out", str(tmp_path / "kit")]
    assert run_kit.main(arguments) == 0
    assert "the checkout has " in capsys.readouterr().out
    large = tmp_path / "large"
    large.write_bytes(bytes(2 << 20))
    monkeypatch.setattr(run_kit, "MAX_BYTES", 2 << 20)
    monkeypatch.setattr(run_kit, "tracked_files", lambda: [large])
    assert run_kit.main(arguments) == 1
    assert "error: together they have more than 2 MiB" in capsys.readouterr().err


def test_the_packages_of_a_kit_have_the_versions_of_the_lock_file() -> None:
    versions = dict(pinned(name).split("==") for name in PACKAGES)
    assert versions["megatron-core"] == "0.19.2"
    with pytest.raises(SystemExit, match=r"lock-3\.12\.txt has no version of no-such-package"):
        pinned("no-such-package")


def test_a_folder_that_is_no_kit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--kit", str(tmp_path), "--out", str(tmp_path / "out")])
    assert re.search(r"no demo/config.yaml; write it with `make gpu-kit`", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_the_last_lines_name_the_result_of_each_section() -> None:
    lines = [
        {"date": "2026-11-30", "section": "start", "ok": True, "seconds": 1.5, "what": "Ray"},
        {"date": "2026-11-30", "section": "start", "seconds": 12.3},
        {"date": "2026-11-30", "section": "train", "step": 3},
        {"date": "2026-11-30", "section": "train", "failed": "not done after 150 s"},
        {"date": "2026-11-30", "section": "train", "seconds": 150.0},
        {"date": "2026-11-30", "section": "evaluate", "skipped": "train failed"},
        {"date": "2026-11-30", "section": "sleep", "ok": False, "what": "memory"},
        {"date": "2026-11-30", "section": "", "failed_sections": ["train"]},
    ]
    assert summary(lines).splitlines() == [
        "start              12.3 s  ok",
        "train             150.0 s  not done after 150 s",
        "evaluate            0.0 s  train failed",
        "sleep               0.0 s  wrong: memory",
    ]


def test_logs_of_all_runs_are_packed_without_models(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "float32"
    (run / "train" / "ray").mkdir(parents=True)
    for name in ("train.log", "train/ray/worker.err", "train/metrics.jsonl", "model.safetensors"):
        (run / name).write_text(name)
    pack_logs(tmp_path / "runs", tmp_path / "logs.tar.xz")
    with tarfile.open(tmp_path / "logs.tar.xz") as tar:
        assert sorted(tar.getnames()) == [
            "float32/train.log",
            "float32/train/metrics.jsonl",
            "float32/train/ray/worker.err",
        ]


def test_every_section_has_a_deadline_and_needs_earlier_ones() -> None:
    names = list(SECTION_SECONDS)
    assert names == list(SECTIONS)
    for name, needs in NEEDS.items():
        assert all(names.index(needed) < names.index(name) for needed in needs)


@pytest.mark.slow
@pytest.mark.multirank
def test_every_section_runs_on_a_cpu(kit: Path, tmp_path: Path) -> None:
    arguments = ["--kit", str(kit), "--out", str(tmp_path), "--device", "cpu", "--small"]
    assert main([*arguments, "--budget", "1500"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    sections = {
        name: [line for line in lines if line["section"] == name] for name in SECTION_SECONDS
    }
    assert all(sections.values())
    assert [line["step"] for line in sections["train"] if "step" in line] == [-1, 0, 1]
    gain = sections["evaluate"][-2]
    assert gain["what"] == "gain, points"
    assert gain["low"] <= gain["value"] <= gain["high"]
    after_kill = sections["killed_rank"][-2]
    assert after_kill["killed"]
    assert after_kill["ok"]
    longest = [line["gap_us"] for line in sections["idle"] if "gap_us" in line][:10]
    assert longest == sorted(longest, reverse=True)
    shape, *steps = sections["published_shape"]
    assert shape["planned_peak_mib"] > 0
    rates = [
        (line["sampled_tokens_per_s"] > 0, line["trained_tokens_per_s"] > 0)
        for line in steps
        if line.get("step", -1) >= 0
    ]
    assert rates == [(True, True)] * 3
    assert "skipped" in sections["train_bf16"][0]
    with tarfile.open(tmp_path / "logs.tar.xz") as tar:
        assert "float32/train.log" in tar.getnames()
    config = RunConfig.load(tmp_path / "work" / "runs" / "bf16" / "config.yaml")
    assert config.run == "bf16"
    assert {policy.bf16 for policy in config.policies.values()} == {True}
