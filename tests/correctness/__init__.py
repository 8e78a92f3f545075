"""Writer of docs/correctness.md: every equation, its source, and the tests that check it independently."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mcore_mas.equations.advantages import ESTIMATORS
from mcore_mas.equations.corrections import CORRECTIONS
from mcore_mas.equations.filters import FILTERS
from mcore_mas.equations.kl import KL_ESTIMATES
from mcore_mas.equations.losses import AGGREGATIONS, LOSSES, ValueObjective

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "correctness.md"

DEFECTS = {  # tests that exclude each earlier defect
    "the σ of one vote, or of equal votes, was replaced by ε, which gave advantages of 7.5e5": (
        "tests/unit/equations/test_advantages.py::test_votes_that_do_not_differ_have_a_sigma_of_one",
        "tests/unit/credit/test_watch.py::test_an_advantage_beyond_the_bound_stops_the_run_with_one_line",
    ),
    "runs that cannot learn anything were accepted": (
        "tests/unit/config/test_runs_that_learn.py::test_a_run_that_can_learn_nothing_is_refused",
        "tests/unit/config/test_runs_that_learn.py::test_a_run_that_can_learn_is_not_refused",
        "tests/unit/credit/test_watch.py::test_a_run_whose_first_steps_have_no_advantage_stops",
        "tests/unit/credit/test_watch.py::test_the_error_has_the_reason_why_there_is_no_advantage",
        "tests/unit/credit/test_watch.py::test_a_real_loop_in_which_all_rewards_are_equal_ends_after_the_first_steps",
    ),
    "bootstrap intervals over five seeds covered 84 %; norms were compared with the same agent's median": (
        "tests/unit/equations/test_intervals.py::test_an_interval_over_a_few_seeds_covers_in_95_of_100",
        "tests/workflow/test_stability.py::test_norms_are_absolute_and_by_agent",
    ),
    "exactness was tested for cross-entropy, and not for the objectives of reinforcement learning": (
        "tests/exactness/test_exactness.py",
        "tests/exactness/test_mutations.py",
    ),
    "the state of a turn was its whole prompt with the history; step rewards lacked penalties": (
        "tests/unit/teams/test_collect.py::test_a_state_of_the_environment_is_an_anchor_without_history",
        "tests/unit/orchestras/test_game_team.py::test_trajectories_without_a_tree_are_compared_in_the_states_that_they_share",
        "tests/unit/credit/test_credit.py::test_a_step_reward_has_the_penalties_of_its_turns",
    ),
    "peers, vote and baseline of estimators were fixed, and some differed from the papers": (
        "tests/unit/equations/test_advantages.py::test_peers_vote_and_baseline_are_options_of_every_relative_estimator",
        "tests/unit/equations/test_advantages.py::test_a_long_trajectory_does_not_set_the_baseline_of_reinforce_pp",
    ),
    "outliers were chosen among all turns instead of within each group": (
        "tests/unit/equations/test_filters.py::test_lowest_spread_drops_the_lowest_variance_over_squared_range",
        "tests/unit/equations/test_filters.py::test_outliers_are_dropped_from_every_group_by_its_size",
    ),
    "GAE along the turns of an agent crossed sibling branches": (
        "tests/unit/equations/test_returns.py::test_gae_never_runs_through_siblings",
    ),
    "the reward of a reply without tokens was added to the next reply": (
        "tests/unit/equations/test_returns.py::test_the_reward_of_a_reply_without_tokens_reaches_no_other_reply",
    ),
    "smaller ones: an unbounded k3, ReMax's baseline, masked turns, truncated sampling, a tree's alpha twice": (
        "tests/unit/equations/test_kl.py::test_k3_is_at_most_10_and_pulls_no_further",
        "tests/unit/training/test_async_rollout.py::test_the_greedy_trajectory_is_rewarded_like_the_others",
        "tests/unit/credit/test_credit.py::test_a_masked_turn_with_a_reward_counts_only_for_its_peers",
        "tests/unit/config/test_runs_that_learn.py::test_replies_sampled_with_top_p_or_top_k_are_warned_of",
        "tests/unit/config/test_runs_that_learn.py::test_alpha_of_the_team_and_of_the_branches_are_not_both_set",
        "tests/unit/orchestras/test_game_team.py::test_a_branch_of_the_tool_agent_is_rewarded_for_its_own_round",
    ),
}
EVALUATION = {  # properties of an evaluation at the scale of the papers
    "no task is dropped because of a reply; a prompt that is too long counts as wrong": (
        "tests/unit/evaluation/test_measure.py::TestLongPrompts::test_a_prompt_that_is_too_long_is_wrong_and_its_task_counts",
    ),
    "alternatively, a prompt that is too long is cut on the configured side, and counted": (
        "tests/unit/evaluation/test_measure.py::TestLongPrompts::test_a_prompt_is_cut_at_the_stated_side",
        "tests/unit/evaluation/test_measure.py::TestLongPrompts::test_cut_prompts_are_played_and_counted",
    ),
    "failed replies are retried with the same seeds": (
        "tests/unit/evaluation/test_measure.py::TestFailures::test_failed_replies_are_played_again_with_their_seeds",
    ),
    "replies that fail every time are reported beside the score; with too many of them there is no score": (
        "tests/unit/evaluation/test_measure.py::TestFailures::test_replies_that_always_fail_are_left_out_of_their_task_and_counted",
        "tests/unit/evaluation/test_evaluate.py::test_too_many_failures_give_no_score_and_the_same_command_goes_on",
    ),
    "the deadline of a request starts when it has a slot": (
        "tests/unit/base/test_limits.py::test_waiting_for_a_slot_is_not_late",
        "tests/unit/engines/test_sglang_engine.py::test_requests_that_wait_for_a_slot_are_not_late",
    ),
    "the number of concurrent trajectories and calls is bounded": (
        "tests/unit/evaluation/test_measure.py::test_trajectories_in_flight_are_bounded_and_waiting_ones_are_not_late",
        "tests/unit/base/test_limits.py::test_calls_in_flight_are_bounded_first_come_first_served",
    ),
    "trajectories are written as they finish, and an evaluation that was killed continues to the same scores": (
        "tests/unit/evaluation/test_evaluate.py::test_a_killed_evaluation_goes_on_to_the_same_scores",
        "tests/unit/evaluation/test_trajectory_shards.py::test_trajectories_of_another_model_are_removed",
    ),
    "engines use all GPUs": ("tests/unit/evaluation/test_engine_gpus.py::test_all_gpus_serve",),
    "a validation has the rules and the sampling parameters of an evaluation": (
        "tests/unit/training/test_async_rollout.py::test_a_validation_has_the_rules_of_an_evaluation",
    ),
    "pass@k and maj@k": (
        "tests/unit/evaluation/test_measure.py::TestPassAtK::test_it_is_the_mean_best_of_all_draws",
        "tests/unit/evaluation/test_measure.py::TestVotes::test_the_most_frequent_answer_is_worth_its_score",
    ),
    "any model can play any agent, and one agent can be left untrained": (
        "tests/workflow/test_cross_play.py::test_each_agent_plays_the_model_of_its_seat",
        "tests/unit/evaluation/test_seats.py::test_one_agent_of_a_shared_policy_can_have_another_model",
        "tests/unit/evaluation/test_seats.py::test_a_model_behind_an_api_can_have_a_seat",
    ),
}
_CHECKED = {  # test file with values that are calculated by hand, by part of the objective
    "loss": "test_losses.py",
    "correction": "test_corrections.py",
    "KL": "test_kl.py",
    "aggregation": "test_aggregation.py",
    "filter": "test_filters.py",
    "critic": "test_losses.py",
}
# Text in the names of the rows of docs/exactness.md that cover a part of the objective, by its name; "" stands for all
# rows of the first table.
_ROWS = {
    "cross_entropy": "",
    "reinforce": "REINFORCE",
    "ppo_clip": "PPO",
    "gspo": "GSPO",
    "importance": "importance weight",
    "tis": "TIS",
    "mis": "MIS",
    "icepop": "IcePop",
    "k1": "k1 in the loss",
    "k2": ", k2",
    "k3": "k3, entropy",
    "k1+": "k1 with the gradient of k2",
    "k3+": "k3 with the gradient of k2",
    "token_mean": "PPO, lower and upper clip",
    "agent_mean": "mean over agents",
    "seq_mean_token_sum": "mean of summed replies",
    "seq_mean_token_mean": "mean of mean replies",
    "seq_mean_token_sum_norm": "constant length",
    "value loss": "value loss",
}
_FINDINGS = {  # rows of docs/studies/claim.md that are repeated here
    "codebook:rescue": (
        "accuracy",
        "A² rescuer",
        "norm rescuer",
        "largest norm rescuer",
        "skill rescuer",
    ),
    "codebook:scale": ("accuracy", "skill solver"),
}
OBJECTIVE: dict[str, Mapping[str, Any]] = {
    "loss": LOSSES,
    "correction": CORRECTIONS,
    "KL": KL_ESTIMATES,
    "aggregation": AGGREGATIONS,
    "filter": FILTERS,
    "critic": {"value loss": ValueObjective},
}


_CREDIT_ROW = (
    r"^\| `(\w+)` \| [^|]* \| [^|]* \| ([^|]*) \| ([^|]*) \|$"  # name, peers, vote, A, source
)


def pages() -> dict[Path, str]:
    """Return the text of the page, with the differences measured now."""
    from tests.support.credit_oracle import largest_differences

    return {PAGE: page(largest_differences())}


def page(differences: Mapping[str, float]) -> str:
    """Return the page's text.

    Args:
        differences: difference of each estimator, from `tests.support.credit_oracle.largest_differences`.
    """
    credit_page = (ROOT / "docs" / "credit.md").read_text(encoding="utf-8")
    equations = {
        name: (equation, source)
        for name, equation, source in re.findall(_CREDIT_ROW, credit_page, re.MULTILINE)
    }
    estimators = []
    for name in ESTIMATORS:
        equation, source = equations[name]
        source = source.replace("(#", "(credit.md#")  # a link within the page on credit
        estimators.append((f"`{name}`", equation, source, f"{differences[name]:.1e}"))

    objective = []
    for part, registry in OBJECTIVE.items():
        for name, entry in registry.items():
            checked = f"`{_CHECKED[part]}`"
            objective.append(
                (part, name, _first_line(entry), checked, largest_gradient_error(name))
            )

    return _TEXT.format(
        estimators=_table(("estimator", "A", "source", "largest difference"), estimators),
        objective=_table(
            ("part", "name", "equation and source", "by hand", "largest gradient error"), objective
        ),
        defects=_table(("defect", "tests"), _with_tests(DEFECTS.items())),
        evaluation=_table(("property", "tests"), _with_tests(EVALUATION.items())),
        findings=_table(("team", "measure", "grpo", "drmas", "drmas - grpo"), findings()),
    )


def largest_gradient_error(name: str) -> str:
    """Return the largest error in the rows of docs/exactness.md that have a part of the objective; "–" for none.

    Each of the page's tables begins with a header row, whose first cell is "row" or "objective".
    """
    label = _ROWS.get(name)
    column: int | None = None
    is_objective_table = False
    errors: list[float] = []
    for line in (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            column = None
        elif cells[0] in ("row", "objective"):
            column = cells.index("gradients") if "gradients" in cells else None
            is_objective_table = cells[0] == "objective"
        elif column is not None and not cells[0].startswith("---"):
            is_wanted_table = label is not None and is_objective_table == bool(label)
            if is_wanted_table and label in cells[0]:
                errors.append(float(cells[column]))
    return f"{max(errors):.1e}" if errors else "–"


def findings() -> list[list[str]]:
    """Return the rows of docs/studies/claim.md with the study's findings."""
    text = (ROOT / "docs" / "studies" / "claim.md").read_text(encoding="utf-8")
    rows = []
    for team, measures in _FINDINGS.items():
        table = text.partition(f"**{team}**")[2]
        for measure in measures:
            row = re.search(rf"^\| {re.escape(measure)} +\|(.*)\|$", table, re.MULTILINE)
            assert row is not None, f"docs/studies/claim.md has no row {measure} of {team}"
            rows.append([team, measure, *(cell.strip() for cell in row[1].split("|"))])
    return rows


def _with_tests(rows: Iterable[tuple[str, Iterable[str]]]) -> list[tuple[str, str]]:
    return [(text, "<br>".join(f"`{test}`" for test in tests)) for text, tests in rows]


def _first_line(entry: Any) -> str:
    """Return the source of an aggregation, or the first line of a function's docstring."""
    text = (
        getattr(entry, "source", None)
        or entry.__doc__
        or "value of the estimate without +, gradient of k2"
    )
    return " ".join(str(text).strip().partition("\n")[0].replace("|", "\\|").split())


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_TEXT = """# Correctness

Each equation, its source, and the independent checks of it. `make site` writes this page.

## Estimators

`tests/support/credit_oracle.py` is a second implementation of each estimator with all of its options
in NumPy, which computes one turn after the other. The last column is the largest
|ours − oracle| / (1 + |oracle|) over 25 random batches with replies of different lengths, a third of
them trees.

{estimators}

## Objective

Tests in `tests/unit/equations/` compare each part with values that were calculated by hand.
[exactness.md](exactness.md) compares gradients of a whole model, in each parallel layout, with those
of a float64 Hugging Face model and an independent implementation of the formulas
(`tests/exactness/formulas.py`). The tests fail if a clip, a KL term or a bound is wrong by 1 %. The
last column is the largest relative error of a gradient over all rows that use the part; – means
that no gradient depends on it.

{objective}

## Defects

Each of these defects was found by an independent check, whose numbers the tests repeat.

{defects}

## The claim of Dr. MAS

Dr. MAS compares the turns of an agent only with each other. [studies/claim.md](studies/claim.md)
trains two teams for which this should matter. Some of its results (means over seeds with 95 % t
intervals):

{findings}

## Evaluation

{evaluation}

`benchmarks/evaluation.py` sends 25,000 scripted requests to a slow server and counts lost replies
([benchmarks.md](benchmarks.md)).

## Engine and trainer

After every update, the checksums of the embedded engine's tensors must equal those of the
trainer's. In every step, the log-probabilities of both are compared
([engines.md](engines.md#agreement)). With several mini-batches, only those of the first one are
compared, because later ones see updated weights. With an importance correction, all of them are
compared, because they are computed before the first update.
[exactness.md](exactness.md#engine-and-trainer-in-bfloat16) measures the differences for right and
stale weights of bfloat16 models with 2 to 32 layers.
"""
