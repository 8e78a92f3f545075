"""Generated data files in the published formats, small: what a run at the scale `tiny` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_mas.rollout.base.files import write_text
from mcore_mas.rollout.base.options import lookup
from mcore_mas.rollout.tasks.arithmetic import arithmetic_tasks
from mcore_mas.rollout.tasks.encyclopedia import encyclopedia_tasks

SEARCH_SOURCES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_ROWS = 14  # of a file
_TESTS = 6  # of a program

Row = dict[str, Any]


def _verl(question: str, answer: str, number: int) -> Row:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": str(number), "question": question},
    }


def _search(question: str, answer: str, number: int) -> Row:
    source = SEARCH_SOURCES[number % len(SEARCH_SOURCES)]
    return {"id": f"made_{number}", "question": question, "golden_answers": [answer], "data_source": source}


def _program(number: int) -> tuple[str, list[str], list[str]]:
    """A problem with the inputs and outputs of its tests."""
    given = list(range(_TESTS))
    question = f"Read a whole number and print it plus {number}."
    return question, [f"{n}\n" for n in given], [f"{n + number}\n" for n in given]


def _apps(number: int) -> Row:
    question, given, wanted = _program(number)
    return {
        "problem_id": number,
        "question": question,
        "input_output": json.dumps({"inputs": given, "outputs": wanted}),
        "starter_code": "",
    }


def _code_contests(number: int) -> Row:
    question, given, wanted = _program(number)
    tests = [{"input": given[part], "output": wanted[part]} for part in (slice(2), slice(2, None))]
    return {"name": f"made_{number}", "description": question, "public_tests": tests[0], "private_tests": tests[1]}


def _live_code_bench(number: int) -> Row:
    question, given, wanted = _program(number)
    tests = [{"input": i, "output": o, "testtype": "stdin"} for i, o in zip(given, wanted, strict=True)]
    return {
        "question_id": f"made_{number}",
        "question_content": question,
        "public_test_cases": json.dumps(tests[:2]),
        "private_test_cases": json.dumps(tests[2:]),
        "metadata": "{}",
    }


def _deep_coder(number: int) -> Row:
    question, given, wanted = _program(number)
    tests = [{"input": i, "output": o, "type": "stdin_stdout"} for i, o in zip(given, wanted, strict=True)]
    return {"problem": question, "tests": json.dumps(tests)}


_QUESTIONS: Mapping[str, Callable[[str, str, int], Row]] = {  # (question, answer, number)
    "math": lambda q, a, n: {"problem": q, "answer": a, "id": str(n)},
    "aime": lambda q, a, n: {"ID": f"1983-{n}", "Question": q, "Answer": a},
    "aime_2024": lambda q, a, n: {"id": n, "problem": q, "solution": f"\\boxed{{{a}}}", "answer": a},
    "aime_2025": lambda q, a, n: {"problem_idx": n, "problem": q, "answer": int(a)},
    "amc_23": lambda q, a, n: {"id": n, "problem": q, "answer": float(a)},
    "dapo": _verl,
    "math_500": lambda q, a, n: {"problem": q, "answer": a, "unique_id": f"test/made/{n}.json"},
    "minerva": lambda q, a, n: {"problem": q, "solution": f"\\boxed{{{a}}}", "answer": a, "idx": n},
    "olympiad_bench": lambda q, a, n: {"id": n, "question": q, "final_answer": [a]},
    "polaris": lambda q, a, n: {"problem": q, "answer": a, "difficulty": "1/8"},
    "search": _search,
}
_PROGRAMS: Mapping[str, Callable[[int], Row]] = {
    "apps": _apps,
    "code_contests": _code_contests,
    "live_code_bench": _live_code_bench,
    "deep_coder": _deep_coder,
    "deep_coder_shown": _deep_coder,
}


def write_tiny_file(path: Path, format: str) -> None:
    """Write `path` with a few generated rows of a published format; files of different names have different tasks.

    Raises:
        UnknownName: nothing is generated in that format.
    """
    seed = sum(map(ord, path.stem))
    if format in _PROGRAMS:
        rows = [_PROGRAMS[format](100 * (seed % 997) + number) for number in range(1, _ROWS + 1)]
    else:
        row = lookup("generated data format", format, _QUESTIONS)
        tasks = (encyclopedia_tasks if format == "search" else arithmetic_tasks)(seed, {"train": _ROWS})
        rows = [row(task.prompt, task.answers[0], number) for number, task in enumerate(tasks)]
    if path.suffix == ".parquet":
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_text(
            path, json.dumps(rows) if path.suffix == ".json" else "".join(f"{json.dumps(row)}\n" for row in rows)
        )
