"""The table of formats: what each published data set calls its question, its answers and its ids."""

from __future__ import annotations

from dataclasses import replace

from rollout.tasks.files.fields import Fields, bare_question, final_answer
from rollout.tasks.files.problem import Format
from rollout.tasks.programs import STYLES, Programs
from rollout.tasks.swe_bench import SweBench

_MATH = Fields(
    env="math",
    question=("question", "problem", "query", "extra_info.question", "extra_info.raw_problem", "prompt", "raw_prompt"),
    answers=(
        *("reward_model.ground_truth", "reward_model.answer", "reward_model.target"),
        *("answer", "ground_truth", "target", "final_answer", "solution"),
    ),
    name=("query_id", "uid", "unique_id", "id", "_id", "idx", "problem_idx", "extra_info.index"),
    read_question=bare_question,
    read_answer=final_answer,
)
_BENCHMARK = replace(_MATH, question=("problem", "question"), answers=("answer", "solution"))
_SEARCH = Fields(
    env="search",
    question=("question", "query", "extra_info.question"),
    answers=(
        *("golden_answers", "reward_model.ground_truth.target", "reward_model.ground_truth"),
        *("answers", "answer", "possible_answers"),
    ),
    name=("id", "_id", "question_id", "extra_info.index"),
)
_MULTI_HOP = replace(_SEARCH, question=("question",), answers=("golden_answers", "answer"))

FORMATS: dict[str, Format] = {
    # any file of math problems, verl's columns included
    "math": _MATH,
    "aime": _BENCHMARK,  # 1983 to 2024
    "aime_2024": _BENCHMARK,
    "aime_2025": _BENCHMARK,
    "amc_23": _BENCHMARK,
    "dapo": replace(
        _MATH,
        question=("extra_info.question", "extra_info.raw_problem", "prompt"),
        answers=("reward_model.ground_truth", "solution"),
        name=("extra_info.index",),
    ),
    "deepscaler": replace(_MATH, question=("problem",), answers=("answer",)),
    "gsm8k": replace(_MATH, question=("question",), answers=("answer",)),
    "math_500": replace(_MATH, question=("problem",), answers=("answer",), name=("unique_id",)),
    "minerva": _BENCHMARK,
    "olympiad_bench": replace(
        _MATH, question=("question", "problem"), answers=("final_answer", "answer"), context=("context",), all_of=True
    ),
    "polaris": replace(_MATH, question=("problem",), answers=("answer",)),
    # any file of questions over passages: Search-R1's and FlashRAG's columns, and the data sets' own
    "search": _SEARCH,
    "nq": replace(_SEARCH, question=("question",), answers=("golden_answers", "answers", "answer")),
    "hotpotqa": _MULTI_HOP,
    "triviaqa": replace(
        _SEARCH,
        question=("question",),
        answers=("golden_answers", "answer.value"),
        aliases=("answer.aliases",),
        name=("id", "question_id", "questionid"),
    ),
    "popqa": replace(_SEARCH, question=("question",), answers=("golden_answers", "possible_answers")),
    "2wikimultihopqa": _MULTI_HOP,
    "musique": replace(_MULTI_HOP, aliases=("answer_aliases",)),
    "bamboogle": _MULTI_HOP,
    "swe_bench": SweBench(),
    # programs and their tests
    **{name: Programs(read=read) for name, read in STYLES.items()},
}
