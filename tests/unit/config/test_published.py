"""The published experiments set what the papers say, name their source, and are all in the page of experiments."""

import itertools
import re
from functools import cache, reduce
from typing import Any

import pytest

from docs.writers.experiments import EXPERIMENTS, pages
from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import experiments

PUBLISHED = sorted(name for name in experiments() if not name.startswith("demo_"))

DRMAS_MATH = {
    "trainer.tasks_per_step": 32,
    "trainer.group_size": 8,
    "trainer.updates_per_step": 1,
    "trainer.checkpoint_every": 100,
    "trainer.validate_every": 10,
    "reward.penalties.invalid.coef": 0.1,
    "loss.entropy": 0.0,
    "loss.kl.coef": 0.0,
    "engine.max_length": 8192 + 4096,
    "engine.overlong_prompts": "middle",
    "evaluation.samples": 16,
    "evaluation.temperature": 0.6,
    "evaluation.top_p": 0.95,
}
T3_TEAM = {"lone": "raw", "peers": "task", "vote": "trajectory"}
T3_AGENT = {"lone": "raw", "peers": "agent", "vote": "turn"}
DRMAS_SEARCH = {
    "trainer.tasks_per_step": 128,
    "trainer.group_size": 5,
    "trainer.updates_per_step": 5,
    "trainer.steps": (79168 + 90447) // 128,  # NQ and HotpotQA, once
    "reward.penalties.invalid.coef": 0.01,
    "loss.entropy": 0.001,
    "orchestra.options.max_turns": 4,
    "env.options.top_k": 3,
    "engine.max_length": 4096 + 800,
    "engine.overlong_prompts": "left",
    "evaluation.samples": 16,
    "evaluation.temperature": 0.6,
    "evaluation.top_p": 0.95,
}
AT_GRPO = {
    "orchestra.options.actions_from": "program",
    "agents.tool.role": "game_coder",
    "advantage.name": "at_grpo",
    "trainer.steps": 200,
    "trainer.tasks_per_step": 32,
    "trainer.group_size": 1,
    "trainer.branching": {"width": 8, "alpha": 1.0, "select": "greedy"},
    "filter.options": {"ratio": 0.5, "by": "state"},
    "reward.name": "local_team",
    "orchestra.options.max_turns": 5,
    "agents.planner.temperature": 1.5,
    "agents.planner.top_p": 0.9,
    "agents.planner.top_k": 20,
    "agents.planner.max_tokens": 2048,
    "evaluation.temperature": 0.0,
}
STRONGER = {
    "trainer.steps": 200,
    "trainer.tasks_per_step": 32,
    "trainer.validate_every": 10,
    "loss.entropy": 0.0,
    "evaluation.samples": 5,
    "evaluation.temperature": 0.6,
    "evaluation.top_p": 0.95,
}
TREE = {
    "advantage.name": "at_grpo",
    "trainer.group_size": 1,
    "trainer.branching.width": 8,
    "reward.name": "local_team",
}
MARS2 = {
    "advantage": {"name": "mars2", "options": {"gamma": 0.3, "lam": 0.5}, "align": None},
    "orchestra.options.max_nodes": 8,
    "trainer.group_size": 1,
    "filter.name": "mean_range",
    "loss.name": "gspo",
    "loss.kl": {
        "coef": 1e-3,
        "estimate": "k3",
        "where": "loss",
        "target": None,
        "horizon": 10_000.0,
    },
    "loss.correction": {"name": "tis", "options": {"high": 2.0}},
    "reward.penalties": {"overlong": {"buffer": 2048}},
    "engine.max_length": 40_000,
    "seed": 42,
}
TTRL = {
    "reward": {"name": "majority", "options": {}, "penalties": {}},
    "advantage.name": "reinforce_pp",
    "trainer.group_size": 8,
}
UNITY = {
    "advantage.name": "gae",
    "trainer.group_size": 1,
    "evaluation.temperature": 0.0,
    "loss.entropy": 0.0,
}
PAPERS = {
    "drmas_t1_4b_single_grpo": DRMAS_MATH
    | {"advantage.name": "grpo", "agents.player.role": "lone_solver", "policies.shared.lr": 1e-6},
    "drmas_t1_8b_shared_grpo": DRMAS_MATH
    | {
        "advantage.name": "grpo",
        "policies.shared.model": "models/Qwen3-8B",
        "agents.verifier.policy": "shared",
    },
    "drmas_t1_4b_separate_drmas": DRMAS_MATH
    | {
        "advantage": {"name": "drmas", "options": {"lone": "raw"}, "align": None},
        "orchestra.options": {"max_loops": 2, "malformed_verdict": "approve"},
        "agents.solver.policy": "solver",
        "agents.solver.max_tokens": 4096,
        "agents.solver.temperature": 1.0,
        "policies.solver.lr": 1e-6,
        "policies.verifier.lr": 1e-6,
    },
    "drmas_t2_3b_single_grpo": DRMAS_SEARCH
    | {"advantage.name": "grpo", "agents.player.max_tokens": 800},
    "drmas_t2_7b_separate_drmas": DRMAS_SEARCH
    | {
        "advantage.name": "drmas",
        "policies.searcher.lr": 1e-6,
        "orchestra.options.malformed_verdict": "answer",
    },
    "drmas_t3_mean_team_std_team": DRMAS_SEARCH | {"advantage.options": {**T3_TEAM, "std": "team"}},
    "drmas_t3_mean_agent_std_team": {"advantage.options": {**T3_AGENT, "std": "team"}},
    "drmas_t3_mean_team_std_agent": {"advantage.options": {**T3_TEAM, "std": "agent"}},
    "drmas_t3_mean_agent_std_agent": {"advantage.options": {**T3_AGENT, "std": "agent"}},
    "drmas_f5_hetero": DRMAS_SEARCH
    | {
        "policies.verifier.model": "models/Qwen2.5-7B",
        "policies.answerer.model": "models/Llama-3.2-3B-Instruct",
    },
    "strongermas_t1_plan_path_shared": AT_GRPO
    | {
        "env.name": "plan_path",
        "data.options": {"size": 10, "obstacles": 0.22},
        "policies.shared.lr": 5e-6,
    },
    "strongermas_t2_sokoban_separate": AT_GRPO
    | {
        "env.name": "sokoban",
        "policies.tool.warmup_steps": 10,
        "policies.planner.model": "models/Qwen3-8B",
    },
    "strongermas_t1_sudoku_single": {
        "env.name": "sudoku",
        "data.options": {"size": 4},
        "advantage.name": "grpo",
        "trainer.group_size": 8,
        "trainer.tasks_per_step": 32,
        "filter.options": {"ratio": 0.5, "by": "task"},
    },
    "strongermas_t3_tool_alone": {"agents.player.role": "game_tool", "orchestra.name": "single"},
    "strongermas_t3_code_alone": {
        "agents.player.role": "game_coder",
        "orchestra": {"name": "single", "options": {"max_turns": 5, "actions_from": "program"}},
        "advantage.name": "grpo",
    },
    "strongermas_t1_code_shared": STRONGER
    | TREE
    | {
        "orchestra.options.max_turns": 5,
        "filter": {"name": "lowest_mean", "options": {"ratio": 0.5, "by": "state"}, "resample": 0},
        "env.options.reward": "rate",
        "engine.max_length": 8192 + 8192,
        "agents.coder.temperature": 1.0,
        "agents.coder.top_p": 0.9,
        "agents.coder.max_tokens": 8192,
        "policies.shared.lr": 5e-6,
        "policies.shared.min_lr": 0.3 * 5e-6,
    },
    "strongermas_t2_code_separate": STRONGER
    | TREE
    | {
        "policies.tester.model": "models/Qwen3-8B",
        "policies.tester.schedule": "cosine",
        "agents.tester.top_k": 20,
    },
    "strongermas_t2_code_single": STRONGER
    | {
        "advantage.name": "grpo",
        "trainer.group_size": 8,
        "filter.options": {"ratio": 0.5, "by": "task"},
    },
    "strongermas_t1_math_separate": STRONGER
    | TREE
    | {
        "orchestra.options.max_turns": 4,
        "filter": None,
        "agents.reasoner.policy": "reasoner",
        "agents.tool_user.max_tokens": 4096,
        "policies.tool_user.warmup_steps": 10,
    },
    "strongermas_t2_math_single": STRONGER
    | {
        "orchestra": {"name": "self_verify", "options": {"max_turns": 3}},
        "advantage.name": "grpo",
        "trainer.group_size": 8,
        "agents.solver.max_tokens": 2048,
        "policies.shared.model": "models/Qwen3-8B",
    },
    "unitymas_t3_nq_decompose_14b": UNITY
    | {
        "agents.answerer.max_tokens": 128,
        "env.options": {"top_k": 4, "reward": "token_f1"},
        "policies.answerer.lr": 1e-6,
        "policies.answerer.critic.lr": 1e-5,
    },
    "unitymas_t3_hotpotqa_m_ask_7b": UNITY
    | {
        "trainer.tasks_per_step": 128,
        "orchestra.options.max_turns": 3,
        "env.options.top_k": 5,
        "agents.planner.policy": "reasoner",
        "agents.answerer.policy": "reasoner",
        "agents.updater.policy": "updater",
    },
    "unitymas_f5_m_ask_3b_shared": UNITY
    | {
        "trainer.tasks_per_step": 128,
        "agents.updater.policy": "shared",
        "policies.shared.critic.lr": 1e-5,
    },
    "unitymas_t4_code_8b": UNITY
    | {
        "trainer.tasks_per_step": 64,
        "data.format": "deep_coder_shown",
        "env.options": {"reward": "rate", "max_tests": 8},
        "orchestra.options.max_turns": 3,
        "agents.coder.max_tokens": 2048,
        "reward.penalties.invalid.coef": 1.0,
        "policies.coder.critic.lr": 1e-5,
    },
    "unitymas_math_refine": UNITY | {"reward.penalties.invalid.coef": 1.0},
    "marti_debate_qwen": {
        "advantage.name": "reinforce_pp",
        "trainer.group_size": 2,
        "orchestra.options": {"debaters": ["debater_1", "debater_2"], "rounds": 2},
        "reward.options": {"history": "own", "formula": "margin", "alpha": 0.5},
    },
    "marti_debate_qwen_grpo": {"advantage.name": "grpo", "reward.options.alpha": 0.5},
    "marti_mixture_qwen_unshaped": {
        "reward.options.alpha": 0.0,
        "agents.aggregator.policy": "aggregator",
    },
    "marti_single_llama": {
        "orchestra.options": {"max_turns": 1},
        "evaluation.samples": 4,
        "trainer.group_size": 2,
    },
    "marti_mars2_8b": MARS2
    | {
        "trainer.tasks_per_step": 16,
        "agents.generator_2.max_tokens": 32768,
        "policies.generator_1.lr": 1e-6,
        "policies.generator_2.model": "models/AReaL-boba-2-8B",
    },
    "marti_mars2_8b_single": MARS2
    | {
        "trainer.tasks_per_step": 32,
        "trainer.updates_per_step": 32 * 8 // 32,
        "orchestra.options.agents": ["generator"],
        "reward.options": {"gamma": 0.0},
    },
    "marti_mars2_8b_shared": MARS2
    | {
        "trainer.tasks_per_step": 16,
        "agents.generator_1.policy": "shared",
        "agents.generator_2.policy": "shared",
    },
    "marti_mars2_32b": MARS2
    | {
        "trainer.tasks_per_step": 16,
        "policies.generator_1.lr": 1e-6,
        "policies.generator_1.model": "models/Qwen3-32B",
    },
    "marti_debate_ttrl": TTRL
    | {"orchestra.options.rounds": 2, "agents.debater_1.policy": "debater_1"},
    "marti_single_ttrl": TTRL | {"orchestra": {"name": "single", "options": {"max_turns": 1}}},
    "mappa_mathchat": {
        "seed": 42,
        "trainer.steps": 8 * 512 // 32,
        "trainer.tasks_per_step": 32,
        "trainer.group_size": 2,
        "trainer.updates_per_step": 32 * 2 // 16,
        "loss.kl.coef": 0.01,
        "loss.kl.where": "reward",
        "policies.coder.lr": 1e-6,
        "orchestra.options.max_programs": 2,
        "engine.max_length": 24576 + 4096,
        "reward.name": "coach",
        "coach.model": "gemini-2.5-flash",
        "coach.fallback": 5.0,
        "coach.retries": 300,
        "coach.judged_with_answer": ["verifier"],
    },
    "mappa_dsbench": {
        "seed": 42,
        "trainer.steps": 30 * 64 // 16,
        "trainer.tasks_per_step": 16,
        "trainer.group_size": 2,
        "trainer.updates_per_step": 16 * 2 // 16,
        "trainer.validate_every": 2,
        "trainer.checkpoint_every": 4,
        "loss.kl.coef": 0.01,
        "loss.kl.where": "reward",
        "policies.modeler.lr": 1e-6,
        "orchestra.options.max_turns": 4,
        "engine.max_length": 24576 + 16384,
        "agents.engineer.max_tokens": 16384,
        "reward": {"name": "coach", "options": {}, "penalties": {"mask_truncated": {}}},
        "coach.model": "gemini-2.5-pro",
        "coach.fallback": 5.0,
        "evaluation.samples": 4,
    },
}

_composed = cache(lambda experiment: resolve([f"experiment={experiment}"]))


def at(values: dict[str, Any], path: str) -> Any:
    return reduce(lambda section, key: section[key], path.split("."), values)


@pytest.mark.parametrize("experiment", PAPERS)
def test_the_settings_are_the_papers(experiment: str) -> None:
    values = _composed(experiment)
    assert {path: at(values, path) for path in PAPERS[experiment]} == PAPERS[experiment]


def test_table_3_differs_in_its_statistics_alone() -> None:
    rows = [_composed(name) for name in PUBLISHED if name.startswith("drmas_t3_")]
    assert len(rows) == 4
    rest = [
        {key: value for key, value in row.items() if key not in ("run", "advantage")}
        for row in rows
    ]
    assert all(other == rest[0] for other in rest)


@pytest.mark.parametrize("kind", ["single", "shared", "separate"])
def test_stronger_mas_trains_its_small_model_on_apps_and_its_large_one_on_code_contests(
    kind: str,
) -> None:
    small, large = (_composed(f"strongermas_{table}_code_{kind}")["data"] for table in ("t1", "t2"))
    [apps], [contests] = small["train"], large["train"]
    assert (apps["format"], apps["skip"], apps["limit"], contests["format"]) == (
        "apps",
        500,
        4000,
        "code_contests",
    )
    tests = {file["format"]: file for file in small["test"]}
    assert (
        list(tests) == ["live_code_bench", "apps", "code_contests"]
        and small["test"] == large["test"]
    )
    assert (tests["apps"]["path"], tests["apps"]["skip"], tests["apps"]["limit"]) == (
        apps["path"],
        0,
        500,
    )


@cache
def graded_rows() -> list[tuple[str, str]]:
    """Return the patterns of experiments in the page's tables, each with the grade of its source."""
    page = pages()[EXPERIMENTS]
    return re.findall(
        r"^\| `([^`]+)` \|.*?\| (primary|secondary|no number known) \|", page, flags=re.MULTILINE
    )


@pytest.mark.parametrize("experiment", PUBLISHED)
def test_an_experiment_says_where_it_is_from_and_how_sure_that_is(experiment: str) -> None:
    comment = " ".join(
        re.findall(r"^# (.*)", experiments()[experiment].read_text(), flags=re.MULTILINE)
    )
    assert re.search(r"\((arXiv \d{4}\.\d{5}|ICLR 2026)\)", comment)
    assert [grade for pattern, grade in graded_rows() if experiment in expand(pattern)]


def expand(pattern: str) -> list[str]:
    """Expand `a_{b,c}` to a_b and a_c, as a shell does."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]
