"""The kit for a GPU writes every line at once, ends what is late, and says what is missing."""

import argparse
import importlib.util
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import acceptance
from benchmarks.gpu.__main__ import PAGE, RESULTS, SECTIONS, Section, main, read, run
from benchmarks.gpu.acceptance_sections import PLACES, SMALL, Skip, te
from benchmarks.gpu.page import page
from benchmarks.gpu.sections import SECTIONS as PROGRAMS
from benchmarks.gpu.shapes import CASES, of_case
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.worker_groups import count_devices, gpus_per_engine, list_worker_groups

pytestmark = pytest.mark.usefixtures("forked_programs")
ROOT = Path(__file__).resolve().parents[2]


def program(code: str, most: float = 20.0) -> Section:
    return Section(most, (sys.executable, "-c", code))


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in json.loads(line).items() if k != "date"}
        for line in out.getvalue().splitlines()
    ]


class Kept(io.StringIO):
    def fileno(self) -> int:
        return sys.__stderr__.fileno()  # type: ignore[union-attr]  # something that can be synced, or says that it cannot


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr("benchmarks.gpu.__main__.os.fsync", lambda _: None)
    return Kept()


def test_a_section_that_hangs_keeps_its_lines_and_leaves_time_for_the_next(out: Kept) -> None:
    hangs = "import time\nprint('{\"ms\": 3}', flush=True)\nprint('not JSON')\ntime.sleep(600)"
    sections = {"first": program(hangs, 1.5), "second": program("print('{\"ms\": 4}')")}
    began = time.monotonic()
    assert run(sections, 60, out) == ["first"]
    assert time.monotonic() - began < 30
    first, late, took, second, last = lines(out)
    assert (first, late) == (
        {"section": "first", "ms": 3},
        {"section": "first", "failed": "not done after 2 s"},
    )
    assert 1.5 <= took["seconds"] < 20
    assert (second, last["section"]) == ({"section": "second", "ms": 4}, "second")


def test_a_section_that_fails_says_why_and_others_go_on(out: Kept) -> None:
    fails = "print('{\"ms\": 3}', flush=True)\nraise ValueError('no such kernel: ü')"
    assert run({"first": program(fails), "second": program("print('{\"ms\": 4}')")}, 60, out) == [
        "first"
    ]
    found = [line for line in lines(out) if "seconds" not in line]
    assert found == [
        {"section": "first", "ms": 3},
        {"section": "first", "failed": "ValueError: no such kernel: ü"},
        {"section": "second", "ms": 4},
    ]


def test_without_budget_nothing_starts(out: Kept) -> None:
    assert run({"first": program("raise SystemExit(3)")}, 0.5, out) == []
    assert lines(out) == [{"section": "first", "skipped": "the budget of 0.5 s is spent"}]


def test_what_was_computed_wrong_is_named_and_ends_the_kit_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {"what": "update, again", "ok": True}
    wrong = [
        {"what": "attention", "layout": "turns", "dtype": "float32", "ok": False},
        {"ok": False},
    ]
    code = "".join(f"print({json.dumps(line)!r})\n" for line in [right, *wrong, {"ms": 3}])
    monkeypatch.setattr(
        "benchmarks.gpu.__main__.SECTIONS", {"first": program(code), "second": program("pass")}
    )
    assert main(["--out", str(tmp_path)]) == 1
    assert read(tmp_path / "results.jsonl")[-1]["wrong"] == [
        "first: attention turns float32",
        "first",
    ]
    assert main(["--out", str(tmp_path), "--only", "second"]) == 0
    assert read(tmp_path / "results.jsonl")[-1]["wrong"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
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
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_without_a_gpu_sections_say_so_and_small_shapes_run(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--out",
        str(tmp_path),
        "--only",
        "attention,profile",
    ]
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this is about machines without a GPU")
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    *found, last = [line for line in read(tmp_path / "results.jsonl") if "seconds" not in line]
    assert last["wrong"] == [] and [line["section"] for line in found] == ["attention", "profile"]
    assert {line["skipped"] for line in found} == {
        "no GPU here; --tiny runs small shapes without one"
    }


def test_measurements_stand_beside_predictions() -> None:
    meter = {
        "section": "meter",
        "model": "4b",
        "layout": "groups",
        "recompute": "full",
        "bytes": {"peak": 96 << 30},
    }
    written = [
        {"section": "probe", "date": "2026-11-22", "gpu": "NVIDIA H200", "gib": 140},
        meter
        | {
            "tokens": 16384,
            "launches": 9322,
            "mfu": 0.301,
            "waits": {"a": 1, "b": 3},
            "copies": {},
        },
        {
            "section": "updates",
            "date": "2026-11-22",
            "model": "4b",
            "layout": "groups",
            "recompute": "full",
        }
        | {"mfu": 0.25, "tokens_per_s": 9000, "gib": 91.5},
        {
            "section": "attention",
            "date": "2026-11-22",
            "layout": "turns",
            "triton_ms": 2.4,
            "torch_ms": 48.0,
        },
    ]
    made = page(written)
    assert "Measured on NVIDIA H200, 2026-11-22." in made
    assert (
        "| 4b | full | groups | 16384 | 9322 | 4 | 0 | 0.301 | 96.0 | 0.25 | 91.5 | 9000 |" in made
    )
    assert (
        f"| 30b-a3b | selective | groups |{9 * ' not measured |'}\n" in made
    )  # a mixture of experts
    assert "| turns | 2.4 | not measured | 48.0 |" in made
    assert "| groups | not measured | not measured | not measured |" in made
    without = page(
        [{**written[0], "gpu": None}, *written[1:]]
    )  # figures of a machine without a GPU say nothing
    assert "nothing is measured" in without and "9000" not in without and "0.301" in without


@pytest.mark.parametrize(
    ("sections", "word", "status"),
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
def test_acceptance_tells_nothing_measured_from_passed(
    sections: dict[str, str],
    word: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = "import sys; assert sys.argv[1] == '--sglang' and sys.argv[2].startswith('/')\n"  # what each is told
    monkeypatch.setattr(
        acceptance, "SECTIONS", {name: program(taken + code) for name, code in sections.items()}
    )
    assert acceptance.main(["--out", str(tmp_path)]) == status
    *_, last = read(tmp_path / "results.jsonl")
    assert last["result"] == word and last["failed"] == (
        ["second" if "second" in sections else "first"] if status else []
    )


@pytest.mark.slow
def test_acceptance_adds_up_over_ranks_and_says_what_is_not_here(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this is about machines without a GPU")
    assert acceptance.main(["--out", str(tmp_path), "--only", "nccl,sglang", "--cpu"]) == 0
    found = [line for line in read(tmp_path / "results.jsonl") if "seconds" not in line]
    assert (found[0]["what"], found[0]["ranks"], found[0]["ok"]) == ("all-reduce, GB/s", 2, True)
    assert "SGLang" in found[1]["skipped"] or "make test-sglang" in found[1]["skipped"]
    assert found[2]["result"] == "passed"
    assert acceptance.main(["--out", str(tmp_path), "--only", "te"]) == 0
    *_, said, _took, last = read(tmp_path / "results.jsonl")
    assert (said["skipped"], last["result"]) == ("no GPU here", "nothing measured")


def test_without_transformer_engine_acceptance_names_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Skip, match=r"requirements/transformer_engine\.sh"):
        te(argparse.Namespace())


def test_acceptance_asks_for_as_many_gpus_as_its_trainings_and_their_evaluations_take() -> None:
    for transport, (least, places) in PLACES.items():
        settings = [
            "engine=sglang",
            "engine.python=/x",
            f"engine.transport={transport}",
            *SMALL,
            *places,
        ]
        config = RunConfig.from_values(resolve(["experiment=demo_math", *settings]), transport)
        trained = count_devices(list_worker_groups(config, "GPU"), config.cluster.pool)
        assert least == max(trained, sum(gpus_per_engine(config).values())), transport


def test_the_page_is_current() -> None:
    lines = read(RESULTS)
    assert PAGE.read_text(encoding="utf-8") == page(lines)
    assert list(SECTIONS) == list(PROGRAMS)
    # or an update would be tried that a GPU has no room for; and one of the largest model has room on 80 GB
    peaks = [of_case(lines, "meter", case)["bytes"]["peak"] / 2**30 for case in CASES]  # type: ignore[index]
    assert (
        sum(peak < 75 for case, peak in zip(CASES, peaks, strict=True) if case["model"] == "4b")
        >= 2
    )


def test_make_test_gpu_looks_wherever_a_test_needs_a_gpu() -> None:
    told = (
        (ROOT / "Makefile")
        .read_text(encoding="utf-8")
        .partition("pytest -m gpu ")[2]
        .split("\n")[0]
    )
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "@pytest.mark." + "gpu" in path.read_text()
    ]
    assert len(marked) >= 5 and all(path.is_relative_to(ROOT / told) for path in marked)
