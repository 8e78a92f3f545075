"""Suites: their runs, the stages that runs share, and errors of bad suites."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_mas.pipeline.sharing import settings_digest
from mcore_mas.pipeline.suite import Suite, load_suite
from mcore_mas.pipeline.suite_file import SuiteError, check_command

ROOT = Path(__file__).resolve().parents[2]
MATH = ["experiment=demo_math"]
SEARCH = ["experiment=demo_search"]


def suite(**experiments: list[str]) -> dict[str, object]:
    return {"suite": "x", "experiments": experiments}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "workflow/suites").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_shipped_suite_resolves_and_is_named_after_its_file(path: Path) -> None:
    loaded = Suite.load(yaml.safe_load(path.read_text()))
    assert loaded.name == path.stem
    assert loaded.runs


def test_a_runs_config_has_its_name_and_folder() -> None:
    loaded = Suite.load({**suite(one=MATH), "results": "elsewhere"})
    assert loaded.runs["one"]["run"] == "one"
    assert loaded.runs["one"]["results"] == "elsewhere"


def test_the_stages_of_a_run_follow_from_its_config() -> None:
    external = [*SEARCH, "++retriever.urls=[http://127.0.0.1:9]"]
    loaded = Suite.load(
        suite(plain=MATH, search=SEARCH, external=external, real=[*MATH, "cold_start=null"])
    )
    assert {run: loaded.builds_index(run) for run in loaded.runs} == {
        "plain": False,
        "search": True,
        "external": False,
        "real": False,
    }
    assert loaded.cold_start_owner == {"plain": "plain", "search": "search", "external": "external"}
    assert loaded.run_pattern(builds_index=True) == "search"
    assert loaded.task_owner == {
        "plain": "plain",
        "search": "search",
        "external": "external",
        "real": "plain",
    }
    assert loaded.run_pattern(builds_index=False) == "plain|external"
    assert loaded.run_pattern(builds_index=False, links_tasks=True) == "real"
    assert Suite.load(suite(plain=MATH)).run_pattern(builds_index=True) == "(?!)"


def test_an_override_may_remove_a_key() -> None:
    loaded = Suite.load(suite(a=[*MATH, "~reward.penalties.invalid"]))
    assert loaded.runs["a"]["reward"]["penalties"] == {}


def test_runs_that_differ_only_in_their_seed_are_one_experiment() -> None:
    loaded = Suite.load(suite(a=MATH, a_2=[*MATH, "seed=2"], b=[*MATH, "trainer.steps=3"]))
    assert loaded.experiments == {"a": "a", "a_2": "a", "b": "b"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"experiments": {"a": MATH}}, "suite: 'suite' is a required property"),
        (
            {**suite(a=MATH), "result": "x"},
            "unknown key 'result'; known here: suite, results, config_dir, experiments",
        ),
        ({**suite(a=MATH), "published": []}, "unknown key 'published'; known here"),
        ({"suite": "x"}, "suite: expected runs: experiments, or a grid of them"),
        (
            {**suite(a=MATH), "suite": "x/y"},
            "suite.suite: expected text of letters, .* or digit \\(got 'x/y'\\)",
        ),
        (
            suite(tables=MATH),
            "suite.experiments: expected letters, .*; and not tables, .* \\(got 'tables'\\)",
        ),
        (
            suite(a=["experiment demo_math"]),
            "suite.experiments.a.0: expected KEY=VALUE, or ~KEY to take a key out",
        ),
        (suite(a="seed=1"), "suite.experiments.a: expected a list of overrides, each KEY=VALUE"),
        (
            {"suite": "x", "grid": {"axes": {"seed": 5}}},
            "suite.grid.axes.seed: expected a list of values, not empty",
        ),
        (
            {**suite(a=MATH), "scale": "big"},
            "suite.scale: 'big' is not one of \\['paper', 'tiny'\\]",
        ),
        (
            {**suite(a=MATH), "results": "a b; rm"},
            "suite.results: expected a folder's path of letters, ",
        ),
        ({**suite(a=MATH), "suite": "x" * 101}, "suite.suite: expected text of .* at most 100,"),
        (suite(**{"x" * 300: MATH}), "suite.experiments: expected letters, .* at most 100,"),
        (
            {**suite(a=MATH), "results": "results/" + "x" * 300},
            "suite.results: expected a folder's path .* at most 100 characters between two /",
        ),
        (
            {**suite(a=MATH), "evaluate": {"a": {"x" * 300: {"solver": "base"}}}},
            "suite.evaluate.a: expected small letters, digits and _, at most 100,",
        ),
        (suite(a=["sede=1"]), "run 'a': .*sede"),
        (suite(a=["experiment=demo_maths"]), "run 'a': .*demo_maths"),
        (suite(a=MATH, b=["seed=abc"]), "run 'b': .*seed"),
        (
            {**suite(a=MATH), "results": "/dev/null/x"},
            "results folder '/dev/null/x': /dev/null is not a folder",
        ),
    ],
)
def test_a_bad_suite_is_reported_in_one_line(content: dict[str, object], message: str) -> None:
    with pytest.raises(SuiteError, match=message) as refusal:
        Suite.load(content)
    assert "\n" not in str(refusal.value)


def grid(**keys: object) -> dict[str, object]:
    """Return a suite of a grid of two estimators and two seeds, with further keys."""
    axes = {"experiment": ["demo_math"], "advantage": ["grpo", "drmas"], "seed": [1, 2]}
    return {"suite": "x", "grid": {"axes": axes, "overrides": ["trainer.steps=7"]}, **keys}


def test_every_mistake_of_every_run_is_reported_in_a_line() -> None:
    """A mistake of several runs is reported once."""
    runs = {
        "a": ["experiment=demo_mth"],
        "b": [*MATH, "trainer.stepz=1"],
        "c": [*MATH, "trainer.stepz=1"],
        "d": MATH,
    }
    with pytest.raises(SuiteError) as refusal:
        Suite.load(suite(**runs, e=[*MATH, "engine.max_length=1o"]))
    first, second, third = str(refusal.value).split("\n  ")
    assert first.startswith("run 'a': no experiment 'demo_mth'")
    assert "nearest: demo_math" in first
    assert second.startswith("run 'b': trainer.stepz: unknown key; nearest: steps")
    assert third.startswith("run 'e': engine.max_length: Input should be a valid integer")
    assert '(got "1o")' in third

    runs = {"a": [*MATH, "results=x"], "b": [*MATH, "results=y"], "c": [*MATH, "results=y"]}
    with pytest.raises(SuiteError) as refusal:
        Suite.load(suite(**runs))
    first, second = str(refusal.value).split("\n  ")
    assert first.startswith("run 'a': results=x: all runs of a suite have one folder")
    assert second.startswith("run 'b': results=y: all runs of a suite have one folder")


def test_the_evaluation_of_an_untrained_team_depends_on_settings_that_decide_replies() -> None:
    config = Suite.load(suite(a=MATH)).runs["a"]

    def digest_with(**policy_settings: Any) -> str:
        """Return the digest of an evaluation after changing the solver's policy."""
        solver = {**config["policies"]["solver"], **policy_settings}
        policies = {**config["policies"], "solver": solver}
        return settings_digest({**config, "policies": policies}, "evaluate")

    training_settings = {
        "lr": 1.0,
        "lora": {"rank": 4, "adapter": None},
        "overrides": {"engine": {}, "trainer": {"passes": 2}},
    }
    assert digest_with(**training_settings) == digest_with()
    digests = (
        digest_with(),
        digest_with(model="m"),
        digest_with(lora={"adapter": "a"}),
        digest_with(overrides={"engine": {"max_length": 64}}),
    )
    assert len(set(digests)) == 4


def test_a_target_after_configfile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yml"):
        Path(name).write_text("suite: a\n")
    check_command(["--configfile", "a.yaml", "b.yml"])
    with pytest.raises(SystemExit) as error:
        check_command(["--configfile", "a.yaml", "results/x/train/done.json"])
    assert str(error.value) == (
        "error: --configfile took results/x/train/done.json for a suite; name targets before it: "
        "snakemake results/x/train/done.json --configfile a.yaml"
    )


def test_a_grid_has_a_run_for_each_combination() -> None:
    loaded = Suite.load(grid())
    assert list(loaded.runs) == [
        "demo_math_grpo_1",
        "demo_math_grpo_2",
        "demo_math_drmas_1",
        "demo_math_drmas_2",
    ]
    run = loaded.runs["demo_math_drmas_2"]
    assert (run["advantage"]["name"], run["seed"], run["trainer"]["steps"]) == ("drmas", 2, 7)
    assert loaded.cold_start_owner == {run: run for run in loaded.runs}
    assert set(loaded.experiments.values()) == {"demo_math_grpo_1", "demo_math_drmas_1"}


def test_settings_follow_an_axis_value() -> None:
    settings = {"drmas": ["+advantage.options.lone=raw"]}
    loaded = Suite.load({**grid(), "grid": {**grid()["grid"], "settings": settings}})  # type: ignore[dict-item]
    options = {run: config["advantage"]["options"] for run, config in loaded.runs.items()}
    assert options["demo_math_grpo_1"] == {}
    assert options["demo_math_drmas_1"] == {"lone": "raw"}


def test_runs_that_only_train_differently_share_a_cold_start() -> None:
    loaded = Suite.load(grid(share_cold_starts=True))
    assert loaded.cold_start_owner == {
        "demo_math_grpo_1": "demo_math_grpo_1",
        "demo_math_grpo_2": "demo_math_grpo_2",
        "demo_math_drmas_1": "demo_math_grpo_1",
        "demo_math_drmas_2": "demo_math_grpo_2",
    }
    sharer = loaded.runs["demo_math_drmas_2"]
    assert sharer["cold_start"] is None
    assert {policy["model"] for policy in sharer["policies"].values()} == {
        "results/demo_math_grpo_2/bootstrap/model"
    }
    assert loaded.runs["demo_math_grpo_2"]["cold_start"] is not None


def test_evaluations_with_other_models_need_the_runs_that_train_them(tmp_path: Path) -> None:
    """Models are swapped, or trained alone and combined in one team, as in Table 3 of Stronger-MAS."""
    experiment = ["experiment=demo_math", "cold_start=null"]
    runs = {"mas": experiment, "tool_alone": experiment, "plan_alone": experiment}
    cells = {
        "swapped": {"solver": "mas/verifier", "verifier": "mas/solver"},
        "from_alone": {"solver": "plan_alone", "verifier": "tool_alone"},
        "without_verifier": {"verifier": "base"},
        "api": {"solver": "base", "verifier": {"remote": {"model": "big"}}},
    }
    suite = Suite.load(
        {"suite": "s", "results": str(tmp_path), "experiments": runs, "evaluate": {"mas": cells}}
    )
    states = ("base", "trained", *cells)
    assert suite.evaluations[:6] == [f"mas/evaluation/{state}" for state in states]
    assert len(suite.evaluations) == 10
    assert {state: suite.trained_runs_for("mas", state) for state in states} == {
        "base": [],
        "trained": ["mas"],
        "swapped": ["mas"],
        "from_alone": ["plan_alone", "tool_alone"],
        "without_verifier": ["mas"],
        "api": [],
    }


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"other": {"x": {"solver": "base"}}}, "evaluate: no run 'other'; runs: a"),
        (
            {"a": {"x": {"judge": "base"}}},
            r"evaluate\.a\.x\.judge: no such agent; agents: solver, verifier",
        ),
        (
            {"a": {"x": {"solver": "b"}}},
            r"evaluate\.a\.x\.solver: no run 'b'; expected base, trained, a run \(a\)",
        ),
        (
            {"a": {"x": {"solver": "a/judge"}}},
            "run 'a' has no agent 'judge'; agents: solver, verifier",
        ),
        ({"a": {"base": {"solver": "base"}}}, "suite.evaluate.a: expected small letters"),
        ({"a": {"x": {"solver": {}}}}, "suite.evaluate.a.x.solver: expected base, trained, a run"),
    ],
)
def test_an_evaluation_that_cannot_be_played_is_reported_in_one_line(
    tmp_path: Path, cells: dict[str, Any], message: str
) -> None:
    suite = {
        "suite": "s",
        "results": str(tmp_path),
        "experiments": {"a": ["experiment=demo_math"]},
        "evaluate": cells,
    }
    with pytest.raises(SuiteError, match=message) as refusal:
        Suite.load(suite)
    assert "\n" not in str(refusal.value)


def test_an_error_of_a_suite_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("{suite: s, experimets: {}}")
    message = f"{file}: suite: unknown key 'experimets'; known here: suite"
    with pytest.raises(SuiteError, match=re.escape(message)):
        load_suite(str(file))
