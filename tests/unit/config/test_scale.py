"""The scale tiny: what changes of a published experiment, and files that are made in place of published ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError
from rollout.tasks.files import read_task_file
from rollout.tasks.tiny_files import SEARCH_SOURCES, write_tiny_file

SYSTEMS = [
    "drmas_t1_8b_separate_drmas",
    "drmas_t2_7b_shared_grpo",
    "mappa_dsbench",
    "marti_mars2_8b",
    "strongermas_t1_math_shared",
    "unitymas_t4_code_4b",
]


def test_a_search_run_by_hand() -> None:
    overrides = ["experiment=drmas_t2_7b_separate_drmas"]
    paper = resolve(overrides, None, "paper")
    tiny = resolve(overrides, None, "tiny")
    assert paper["policies"]["verifier"]["tp"] == 2
    assert tiny["policies"]["verifier"]["tp"] == 1
    assert tiny["policies"]["verifier"]["model"] == "results/models/Qwen2.5-7B"
    for key in ("steps", "group_size", "updates_per_step"):
        assert tiny["trainer"][key] == 2
    test_file = tiny["data"]["test"][0]
    assert test_file["path"] == "results/data/search/test.parquet"
    assert (test_file["limit_per_source"], test_file["limit"]) == (1, None)
    assert (paper["retriever"]["folder"], paper["retriever"]["threads"]) == ("data/wiki-18", 32)
    assert {key: value for key, value in tiny["retriever"].items() if value is not None} == {
        "passages": "results/data/search/passages.jsonl",
        "encoder": "minilm",
        "index": "flat",
        "threads": 1,
        "urls": [],
        "patience_s": 1800.0,
        "timeout_s": 300.0,
        "shards": 1,
        "ranking": "dense",
        "device": "cpu",
    }
    for section in ("advantage", "loss", "env"):
        assert tiny[section] == paper[section]
    assert paper["orchestra"]["options"]["max_turns"] == 4
    assert tiny["orchestra"]["options"]["max_turns"] == 2


@pytest.mark.parametrize("name", SYSTEMS)
def test_one_of_every_system_composes(name: str) -> None:
    tiny = resolve([f"experiment={name}"], None, "tiny")
    assert tiny["engine"]["name"] == "embedded" and tiny["coach"] is None
    assert {agent["max_tokens"] for agent in tiny["agents"].values()} == {16}


def test_a_policy_that_trains_in_fp8_has_a_tiny_scale() -> None:
    fp8 = [f"policy_defaults.{setting}" for setting in ("fp8=hybrid", "layers=te", "bf16=true")]
    overrides = ["experiment=drmas_t1_4b_separate_grpo", *fp8]
    assert resolve(overrides)["policies"]["verifier"]["fp8"] == "hybrid"
    assert resolve(overrides, None, "tiny")["policies"]["verifier"]["fp8"] is None


def test_a_policys_overrides_do_not_exceed_the_tiny_scale() -> None:
    overrides = (
        "{engine: {max_length: 16384}, trainer: {updates_per_step: 4}, loss: {entropy: 0.5}}"
    )
    experiment = ["experiment=drmas_t1_4b_separate_grpo", f"policies.solver.overrides={overrides}"]
    tiny = resolve(experiment, None, "tiny")["policies"]["solver"]["overrides"]
    assert tiny == {"engine": {}, "loss": {"entropy": 0.5}, "trainer": {}}


@pytest.mark.parametrize(
    "override, message",
    [
        ("policies=3", "policies: Input should be an object (got 3)"),
        ("reward=3", "reward"),
        ("agents.solver=3", "agents.solver"),
    ],
)
def test_a_section_of_a_wrong_type_is_named_at_every_scale(override: str, message: str) -> None:
    origin = f"configs/ with experiment=demo_math {override}: "
    for scale in ("paper", "tiny"):
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            resolve(["experiment=demo_math", override], None, scale)
        assert str(caught.value).count(origin) == 1


def test_a_remote_model_has_no_tiny_scale() -> None:
    remote = "{remote: {model: m, url: 'http://127.0.0.1:1'}, model: ''}"
    frozen = ["agents.verifier.loss_weight=0", f"++policies.verifier={remote}"]
    with pytest.raises(ConfigError, match=r"policies\.verifier: a remote model has no tiny scale"):
        resolve(["experiment=drmas_t1_4b_separate_grpo", *frozen], None, "tiny")


@pytest.mark.parametrize(
    ("format", "suffix"),
    [
        *(
            (name, ".parquet")
            for name in ("aime_2024", "aime_2025", "amc_23", "dapo", "math", "math_500", "minerva")
        ),
        *(
            (name, ".parquet")
            for name in ("olympiad_bench", "polaris", "search", "code_contests", "aime")
        ),
        *(
            (name, ".jsonl")
            for name in ("apps", "live_code_bench", "deep_coder", "deep_coder_shown")
        ),
        ("math", ".json"),
    ],
)
def test_generated_files_are_read_as_published_ones(
    tmp_path: Path, format: str, suffix: str
) -> None:
    path = tmp_path / f"x{suffix}"
    write_tiny_file(path, format)
    tasks = [located.task for located in read_task_file(path, format=format, split="train")]
    assert len({task.id for task in tasks}) == len({task.prompt for task in tasks}) == 14
    assert all(task.answers for task in tasks)
    if format == "search":
        assert {task.source for task in tasks} == set(SEARCH_SOURCES)
