"""GPU kit: each result line is written at once, late sections are ended, and missing results have a reason."""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from benchmarks.gpu import acceptance
from benchmarks.gpu.__main__ import PAGE, RESULTS, SECTIONS, Section, main, read, run
from benchmarks.gpu.acceptance_sections import PLACEMENTS, SMALL, Skip, te
from benchmarks.gpu.page import page
from benchmarks.gpu.sections import SECTIONS as PROGRAMS
from benchmarks.gpu.shapes import CASES, line_of_case
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.worker_groups import count_devices, gpus_per_engine, list_worker_groups

pytestmark = pytest.mark.usefixtures("forked_programs")
ROOT = Path(__file__).resolve().parents[3]


def program(code: str, seconds: float = 20.0) -> Section:
    """Return a section that runs Python code."""
    return Section(seconds, (sys.executable, "-c", code))


def lines_of(out: TextIO) -> list[dict[str, Any]]:
    """Return the result lines of a file without their dates."""
    out.seek(0)
    lines = [json.loads(line) for line in out]
    for line in lines:
        del line["date"]
    return lines


@pytest.fixture
def out(tmp_path: Path) -> Iterator[TextIO]:
    """Open an empty results.jsonl."""
    with (tmp_path / "results.jsonl").open("w+", encoding="utf-8") as file:
        yield file


def test_a_section_that_hangs_is_ended_and_its_lines_stay(out: TextIO) -> None:
    hangs = "import time\nprint('{\"ms\": 3}', flush=True)\nprint('not JSON')\ntime.sleep(600)"
    sections = {"first": program(hangs, seconds=3), "second": program("print('{\"ms\": 4}')")}
    start = time.monotonic()
    assert run(sections, 60, out) == ["first"]
    assert time.monotonic() - start < 30

    result, failure, duration, second_result, second_duration = lines_of(out)
    assert result == {"section": "first", "ms": 3}
    assert failure == {"section": "first", "failed": "not done after 3 s"}
    assert 3 <= duration["seconds"] < 20
    assert second_result == {"section": "second", "ms": 4}
    assert second_duration["section"] == "second"


def test_a_failed_section_writes_its_error_and_the_next_section_runs(out: TextIO) -> None:
    fails = "print('{\"ms\": 3}', flush=True)\nraise ValueError('no such kernel: ü')"
    sections = {"first": program(fails), "second": program("print('{\"ms\": 4}')")}
    assert run(sections, 60, out) == ["first"]
    assert [line for line in lines_of(out) if "seconds" not in line] == [
        {"section": "first", "ms": 3},
        {"section": "first", "failed": "ValueError: no such kernel: ü"},
        {"section": "second", "ms": 4},
    ]


def test_a_section_without_time_left_is_skipped(out: TextIO) -> None:
    assert run({"first": program("raise SystemExit(3)")}, 0.5, out) == []
    assert lines_of(out) == [{"section": "first", "skipped": "the budget of 0.5 s is spent"}]


def test_a_section_is_skipped_if_one_that_it_needs_has_failed(out: TextIO) -> None:
    fails = program("raise SystemExit(1)")
    needing = Section(20, (sys.executable, "-c", "raise SystemExit(3)"), needs=("first", "absent"))
    other = Section(20, (sys.executable, "-c", "print('{\"ms\": 4}')"), needs=("absent",))
    assert run({"first": fails, "second": needing, "third": other}, 60, out) == ["first"]
    assert [line for line in lines_of(out) if "seconds" not in line] == [
        {"section": "first", "failed": "exit status 1"},
        {"section": "second", "skipped": "first failed"},
        {"section": "third", "ms": 4},
    ]


def test_failed_checks_are_named_in_the_summary_and_set_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed_lines = [
        {"what": "update, again", "ok": True},
        {"what": "attention", "layout": "turns", "dtype": "float32", "ok": False},
        {"ok": False},
        {"ms": 3},
    ]
    code = "".join(f"print({json.dumps(line)!r})\n" for line in printed_lines)
    sections = {"first": program(code), "second": program("pass")}
    monkeypatch.setattr("benchmarks.gpu.__main__.SECTIONS", sections)
    assert main(["--out", str(tmp_path)]) == 1
    assert read(tmp_path / "results.jsonl")[-1]["wrong"] == [
        "first: attention turns float32",
        "first",
    ]
    assert main(["--out", str(tmp_path), "--only", "second"]) == 0
    assert read(tmp_path / "results.jsonl")[-1]["wrong"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--out", "x", "--only", "probe,atention"],
            "--only: atention; there are probe, correctness",
        ),
        (["--only", "probe"], "--out: a folder for results.jsonl is needed"),
        (["--out", "x", "--budget", "-1"], "--budget: -1 seconds; it must be above 0"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_sections_are_skipped_without_a_gpu(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this test is about machines without a GPU")
    options = ["--out", str(tmp_path), "--only", "attention,profile"]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in read(tmp_path / "results.jsonl") if "seconds" not in line]
    *section_lines, summary = lines
    assert summary["wrong"] == []
    assert [line["section"] for line in section_lines] == ["attention", "profile"]
    for line in section_lines:
        assert line["skipped"] == "no GPU here; --tiny runs small shapes without one"


def test_the_page_shows_measurements_beside_predictions() -> None:
    case = {"model": "4b", "layout": "groups", "recompute": "full"}
    probe = {"section": "probe", "date": "2026-11-22", "gpu": "NVIDIA H200", "gib": 140}
    prediction = {
        "section": "meter",
        **case,
        "bytes": {"peak": 96 << 30},
        "tokens": 16384,
        "mfu": 0.301,
        "operations": {"counted": 6e14, "model": 5e14},
    }
    update = {
        "section": "updates",
        "date": "2026-11-22",
        **case,
        "mfu": 0.25,
        "tokens_per_s": 9000,
        "gib": 91.5,
    }
    attention = {
        "section": "attention",
        "date": "2026-11-22",
        "layout": "turns",
        "narrow_ms": 2.4,
        "torch_ms": 48.0,
    }
    text = page([probe, prediction, update, attention])
    assert "Measured on NVIDIA H200, 2026-11-22." in text
    update_row = "| 4b | full | groups | 16384 | 0.301 | 96.0 | 0.25 | 0.3 | 91.5 | 9000 |"
    assert update_row in text
    mixture_row = f"| 30b-a3b | selective | groups |{7 * ' – |'}\n"
    assert mixture_row in text
    assert "| turns | – | 2.4 | 48.0 |" in text
    assert "| groups | – | – | – |" in text

    # Measurements on a machine without a GPU are left out; predictions stay.
    text = page([probe | {"gpu": None}, prediction, update, attention])
    assert "nothing is measured" in text
    assert "9000" not in text
    assert "0.301" in text


@pytest.mark.parametrize(
    ("sections", "result", "status"),
    [
        (
            {"first": 'print(\'{"skipped": "no GPU here"}\')', "second": "print('{\"gpus\": []}')"},
            "nothing measured",
            0,
        ),
        (
            {"first": "print('{\"ok\": true}')", "second": 'print(\'{"skipped": "one GPU"}\')'},
            "passed",
            0,
        ),
        ({"first": "print('{\"ok\": true}')", "second": "raise SystemExit(2)"}, "failed", 1),
        ({"first": "print('{\"ok\": true}', flush=True)\nassert False, 'the second'"}, "failed", 1),
        ({"first": "print('{\"ok\": true}')\nprint('{\"ok\": false}')"}, "failed", 1),
    ],
)
def test_acceptance_distinguishes_nothing_measured_from_passed(
    sections: dict[str, str],
    result: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Every section gets the folder of SGLang's environment.
    check = "import sys; assert sys.argv[1] == '--sglang' and sys.argv[2].startswith('/')\n"
    programs = {name: program(check + code) for name, code in sections.items()}
    monkeypatch.setattr(acceptance, "SECTIONS", programs)
    assert acceptance.main(["--out", str(tmp_path)]) == status

    summary = read(tmp_path / "results.jsonl")[-1]
    assert summary["result"] == result
    last_section = list(sections)[-1]
    assert summary["failed"] == ([last_section] if status else [])


@pytest.mark.slow
def test_acceptance_sums_over_ranks_and_names_missing_hardware(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this test is about machines without a GPU")
    assert acceptance.main(["--out", str(tmp_path), "--only", "nccl,sglang", "--cpu"]) == 0
    lines = [line for line in read(tmp_path / "results.jsonl") if "seconds" not in line]
    all_reduce, sglang, summary = lines
    assert all_reduce["what"] == "all-reduce, GB/s"
    assert all_reduce["ranks"] == 2
    assert all_reduce["ok"]
    assert "SGLang" in sglang["skipped"] or "make test-sglang" in sglang["skipped"]
    assert summary["result"] == "passed"

    assert acceptance.main(["--out", str(tmp_path), "--only", "te"]) == 0
    transformer_engine, _, summary = read(tmp_path / "results.jsonl")[-3:]
    assert transformer_engine["skipped"] == "no GPU here"
    assert summary["result"] == "nothing measured"


def test_acceptance_without_transformer_engine_names_its_install_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Skip, match=r"requirements/transformer_engine\.sh"):
        te(argparse.Namespace())


def test_acceptance_requires_the_gpus_of_its_trainings_and_evaluations() -> None:
    for transport, (required_gpus, placement) in PLACEMENTS.items():
        engine = ["engine=sglang", "engine.python=/x", f"engine.transport={transport}"]
        overrides = ["experiment=demo_math", *engine, *SMALL, *placement]
        config = RunConfig.from_values(resolve(overrides), transport)
        training_gpus = count_devices(list_worker_groups(config, "GPU"), config.cluster.pool)
        evaluation_gpus = sum(gpus_per_engine(config).values())
        assert required_gpus == max(training_gpus, evaluation_gpus), transport


def test_the_page_is_current() -> None:
    lines = read(RESULTS)
    assert PAGE.read_text(encoding="utf-8") == page(lines)
    assert list(SECTIONS) == list(PROGRAMS)


def test_the_peak_of_every_case_is_predicted_and_two_cases_of_4b_fit_on_80_gb() -> None:
    """The kit skips an update that does not fit, and knows that by the prediction."""
    lines = read(RESULTS)
    fitting_4b_cases = 0
    for case in CASES:
        prediction = line_of_case(lines, "meter", case)
        assert prediction is not None, case
        if case["model"] == "4b" and prediction["bytes"]["peak"] < 75 * 2**30:
            fitting_4b_cases += 1
    assert fitting_4b_cases >= 2


def test_make_test_gpu_runs_the_folder_of_all_gpu_tests() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    match = re.search(r"pytest -m gpu (\S+)$", makefile, re.MULTILINE)
    assert match
    folder = ROOT / match[1]
    marker = "@pytest.mark." + "gpu"  # in two parts, so that this file is not found
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if marker in path.read_text()]
    assert len(files) >= 5
    assert all(path.is_relative_to(folder) for path in files)


@pytest.mark.slow
def test_every_check_passes_with_small_shapes_on_a_cpu(tmp_path: Path) -> None:
    """The section `hand_over` also checks that weights reach another process unchanged."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this test is about machines without a GPU")
    sections = ["--only", "correctness,hand_over,engine,updates"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(tmp_path), *sections]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    lines = read(tmp_path / "results.jsonl")
    assert lines[-1]["wrong"] == []

    updates = [line["model"] for line in lines if "tokens_per_s" in line and "model" in line]
    assert updates == ["tiny", "tiny-moe"]
    compared = {line["model"] for line in lines if line.get("what", "").endswith("of the CPU")}
    assert compared == {"tiny", "tiny-moe"}
    checks = {(line["section"], line["what"]) for line in lines if "ok" in line}
    assert checks == {
        ("correctness", "attention"),
        ("correctness", "attention, dense"),
        ("correctness", "update, again"),
        ("correctness", "update, sleeps"),
        ("correctness", "update, restores"),
        ("correctness", "update, logprobs of the CPU"),
        ("correctness", "update, gradients of the CPU"),
        ("correctness", "norm"),
        ("correctness", "sum and norm"),
        ("correctness", "head"),
        ("correctness", "bfloat16"),
        ("hand_over", "hand-over, GB/s"),
        ("engine", "engine and trainer"),
    }


@pytest.mark.slow
def test_every_benchmark_can_be_imported() -> None:
    paths = (ROOT / "benchmarks").rglob("*.py")
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    names.remove("benchmarks.support.trl_steps")  # runs in an environment that has TRL
    code = f"import importlib\nfor name in {sorted(names)}: importlib.import_module(name)"
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
