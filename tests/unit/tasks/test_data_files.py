"""Published data files: their rows as tasks, rows of another shape, and repeated tasks."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mcore_mas as mm
from mcore_mas.api.tasks import split_tasks
from rollout.records.files import RecordError, read_tasks, write_tasks
from rollout.records.trajectory import Task
from rollout.tasks.fields import Fields
from rollout.tasks.files import FORMATS, LocatedTask, distinct_tasks, read_task_file
from rollout.tasks.rows import read_rows

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows))
    return path


def read(path: Path, format: str, **options: str) -> list[Task]:
    located = read_task_file(path, format=format, split="test", **options)
    return [entry.task for entry in located]


def digest(question: str) -> str:
    """Return the digest of a question in the id of its task."""
    return hashlib.blake2b(question.encode(), digest_size=6).hexdigest()


def verl_row(prompt: Any, truth: Any, **columns: Any) -> dict[str, Any]:
    """Return a row with the columns of verl."""
    return {
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        **columns,
    }


def user_message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# `expected`: id of the task without its digest, question, and answers.
@pytest.mark.parametrize(
    ("format", "suffix", "row", "expected"),
    [
        (
            "dapo",
            ".parquet",
            verl_row(
                user_message(f"{DAPO_PREFIX}What is 2+2?{DAPO_SUFFIX}"),
                "4",
                data_source="math_dapo",
                extra_info={"index": "9a9b6eb4"},
            ),
            ("math_dapo/9a9b6eb4", "What is 2+2?", ("4",)),
        ),
        (
            "dapo",
            ".parquet",
            verl_row(
                user_message(
                    "What is 2+2?\n\nLet's think step by step and output the final answer within \\boxed{}."
                ),
                "4",
            ),
            ("dapo", "What is 2+2?", ("4",)),
        ),
        (
            "math",
            ".parquet",
            verl_row(
                user_message("Ignored."),
                "113",
                data_source="aime24",
                extra_info={"index": 0, "question": "Find m.", "answer": ""},
            ),
            ("aime24/0", "Find m.", ("113",)),
        ),
        (
            "math",
            ".jsonl",
            {"query": "1+1?", "target": 2, "uid": "u1"},
            ("math/u1", "1+1?", ("2",)),
        ),
        (
            "math",
            ".jsonl",
            {"problem": "1+1?", "reward_model": '{"ground_truth": "[\\"2\\", \\"two\\"]"}'},
            ("math", "1+1?", ("2", "two")),
        ),
        (
            "math",
            ".jsonl",
            {"problem": "Which interval?", "answer": "[0, 1]"},
            ("math", "Which interval?", ("[0, 1]",)),
        ),
        (
            "deepscaler",
            ".json",
            {"problem": "Solve.", "answer": "-\\frac{2}{3}", "solution": "Long."},
            ("deepscaler", "Solve.", ("-\\frac{2}{3}",)),
        ),
        (
            "math_500",
            ".jsonl",
            {
                "problem": "Convert.",
                "solution": "It is $\\boxed{(3,1)}$.",
                "answer": "\\left( 3, 1 \\right)",
                "subject": "Precalculus",
                "level": 2,
                "unique_id": "test/precalculus/807.json",
            },
            ("math_500/test/precalculus/807.json", "Convert.", ("\\left( 3, 1 \\right)",)),
        ),
        (
            "aime_2024",
            ".parquet",
            {
                "id": 60,
                "problem": "Walk.",
                "solution": "No.",
                "answer": "204",
                "url": "u",
                "year": "2024",
            },
            ("aime_2024/60", "Walk.", ("204",)),
        ),
        (
            "aime_2024",
            ".jsonl",
            {"ID": "2024-II-4", "Problem": "Log.", "Solution": "No.", "Answer": 33},
            ("aime_2024/2024-II-4", "Log.", ("33",)),
        ),
        (
            "aime_2024",
            ".jsonl",
            {"id": 60, "problem": "Walk.", "solution": "\\boxed{204}"},
            ("aime_2024/60", "Walk.", ("204",)),
        ),
        (
            "aime_2025",
            ".parquet",
            {"problem_idx": 1, "problem": "Base.", "answer": 70, "problem_type": ["Number Theory"]},
            ("aime_2025/1", "Base.", ("70",)),
        ),
        (
            "aime",
            ".csv",
            {
                "ID": "1983-1",
                "Year": 1983,
                "Problem Number": 1,
                "Question": "Let x.",
                "Answer": "060",
                "Part": "",
            },
            ("aime/1983-1", "Let x.", ("060",)),
        ),
        (
            "amc_23",
            ".parquet",
            {"id": 0, "problem": "Cities.", "answer": 27.0},
            ("amc_23/0", "Cities.", ("27",)),
        ),
        (
            "minerva",
            ".parquet",
            {
                "problem": "Mass?",
                "solution": "\\boxed{1.6}",
                "answer": "1.6",
                "idx": 3,
                "type": "Astronomy",
            },
            ("minerva/3", "Mass?", ("1.6",)),
        ),
        (
            "olympiad_bench",
            ".parquet",
            {
                "id": 1606,
                "question": "Find x, y.",
                "context": "Let x<y.",
                "final_answer": ["1", "3"],
                "unit": None,
            },
            ("olympiad_bench/1606", "Let x<y.\nFind x, y.", ("1, 3",)),
        ),
        (
            "polaris",
            ".parquet",
            {"problem": "P.", "answer": "6", "difficulty": "1/8"},
            ("polaris", "P.", ("6",)),
        ),
        (
            "gsm8k",
            ".parquet",
            {"question": "Q.", "answer": "9 * 2 = 18\n#### 18"},
            ("gsm8k", "Q.", ("18",)),
        ),
        (
            "search",
            ".parquet",
            {
                "id": "train_0",
                "question": "total number of death row inmates in the us?",
                "golden_answers": ["2,718"],
                "data_source": "nq",
                **verl_row(
                    user_message("Answer the question: total ..."),
                    {"target": ["2,718"]},
                ),
                "extra_info": {"index": 0, "split": "train"},
            },
            ("nq/train_0", "total number of death row inmates in the us?", ("2,718",)),
        ),
        (
            "search",
            ".parquet",
            {
                "data_source": "popqa",
                **verl_row(
                    [], {"target": ["a", "b", "a"]}, extra_info={"index": 7, "question": "Who?"}
                ),
            },
            ("popqa/7", "Who?", ("a", "b")),
        ),
        (
            "nq",
            ".jsonl",
            {"question": "who?", "answer": ["Ann", "Anne"]},
            ("nq", "who?", ("Ann", "Anne")),
        ),
        (
            "hotpotqa",
            ".json",
            {
                "_id": "5a8b",
                "question": "Same?",
                "answer": "yes",
                "context": [["T", ["s"]]],
                "level": "hard",
            },
            ("hotpotqa/5a8b", "Same?", ("yes",)),
        ),
        (
            "triviaqa",
            ".json",
            {
                "Question": "Which?",
                "QuestionId": "tc_1",
                "Answer": {"Value": "Sunset Blvd", "Aliases": ["Sunset Blvd", "Sunset Boulevard"]},
            },
            ("triviaqa/tc_1", "Which?", ("Sunset Blvd", "Sunset Boulevard")),
        ),
        (
            "popqa",
            ".parquet",
            {
                "id": 4222362,
                "question": "Job?",
                "possible_answers": '["politician", "pol"]',
                "obj": "politician",
            },
            ("popqa/4222362", "Job?", ("politician", "pol")),
        ),
        (
            "2wikimultihopqa",
            ".json",
            {"_id": "13f5", "question": "Mum?", "answer": "Eve"},
            ("2wikimultihopqa/13f5", "Mum?", ("Eve",)),
        ),
        (
            "musique",
            ".jsonl",
            {
                "id": "2hop__1",
                "question": "Where?",
                "answer": "US",
                "answer_aliases": ["USA"],
                "answerable": True,
            },
            ("musique/2hop__1", "Where?", ("US", "USA")),
        ),
        (
            "bamboogle",
            ".csv",
            {"Question": "Who was?", "Answer": "Mill"},
            ("bamboogle", "Who was?", ("Mill",)),
        ),
    ],
)
def test_a_published_row_becomes_a_task(
    tmp_path: Path, format: str, suffix: str, row: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    name, question, answers = expected
    [task] = read(write_rows(tmp_path / f"x{suffix}", [row]), format)
    separator = "-" if "/" in name else "/"
    assert task == Task(
        id=f"{name}{separator}{digest(question)}",
        prompt=question,
        answers=answers,
        env=FORMATS[format].env,
        source=name.partition("/")[0],
        split="test",
    )


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path: Path) -> None:
    """Texts that were cut by their length can end in half a pair."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a \\ud83d b", "answer": "1"}')
    assert [task.prompt for task in read(path, "plain")] == ["a \ufffd b"]


def test_ids_do_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    rows = [{"problem": "One?", "answer": 1}, {"problem": "Two?", "answer": 2}]
    tasks = read(write_rows(tmp_path / "a.json", rows), "math")
    assert [task.id for task in tasks] == [f"math/{digest('One?')}", f"math/{digest('Two?')}"]
    tasks = read(write_rows(tmp_path / "b.parquet", rows[::-1]), "math", source="mine")
    assert [task.id for task in tasks] == [f"mine/{digest('Two?')}", f"mine/{digest('One?')}"]


@pytest.mark.parametrize(
    ("format", "row", "message"),
    [
        (
            "math_500",
            {"question": "?", "answer": 1},
            "has no question: expected column problem to be filled; its columns: question, answer",
        ),
        (
            "aime_2024",
            {"problem": "?", "id": 3},
            "has no answer: expected one of answer, solution to be filled",
        ),
        (
            "aime_2024",
            {"problem": "?", "answer": " "},
            "has no answer: expected one of answer, solution",
        ),
        ("nq", {"question": "?", "answer": [" "]}, "has an empty answer"),
        (
            "nq",
            {"question": "?", "answer": True},
            "has an answer that is a bool (True); expected text, a finite number or a list",
        ),
        (
            "math",
            {"problem": "?", "solution": "so it is" * 60},
            "has no final answer of 1 to 400 characters",
        ),
        ("math", {"problem": "?", "solution": "\\boxed{4"}, "has no final answer"),
        (
            "dapo",
            verl_row([{"role": "system", "content": "x"}], "1"),
            "has a question that is neither text nor a conversation with one user message",
        ),
        (
            "dapo",
            verl_row(user_message("a") + user_message("b"), "1"),
            "has a question that is neither text nor a conversation with one user message",
        ),
    ],
)
def test_a_row_of_another_shape_is_an_error(
    tmp_path: Path, format: str, row: dict[str, Any], message: str
) -> None:
    good_row = {
        "problem": "Q",
        "question": "Q",
        "prompt": "Q",
        "answer": "1",
        "reward_model": {"ground_truth": "1"},
    }
    path = write_rows(tmp_path / "x.jsonl", [good_row, row])
    with pytest.raises(RecordError) as caught:
        read(path, format)
    assert str(caught.value).startswith(f"{path}: line 2 of format {format} {message}")


def test_files_of_tasks_have_ids_sources_and_splits_of_their_own(tmp_path: Path) -> None:
    task = Task(id="t/1", prompt="?", answers=("1",), env="math", source="t", split="train")
    write_tasks(tmp_path / "x.parquet", [task])
    assert read(tmp_path / "x.parquet", "tasks") == [task]


class TestRepeatedTasks:
    ONE = {"problem": "One?", "answer": 1}  # noqa: RUF012
    TWO = {"problem": "Two?", "answer": 2}  # noqa: RUF012

    def distinct(
        self, path: Path, earlier_tasks: dict[str, LocatedTask] | None = None, *, drop: bool = True
    ) -> list[Task]:
        located = read_task_file(path, format="math", split="test")
        return list(
            distinct_tasks(located, {} if earlier_tasks is None else earlier_tasks, drop=drop)
        )

    def test_they_are_dropped_or_an_error(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "x.json", [self.ONE, self.TWO, self.ONE])
        assert [task.prompt for task in self.distinct(path)] == ["One?", "Two?"]
        message = r"row 3: task math/\w+ is in .*x.json: row 1 already; set data.duplicates"
        with pytest.raises(RecordError, match=message):
            self.distinct(path, drop=False)

    def test_another_answer_to_the_same_question_is_an_error(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "y.json", [self.ONE, {"problem": "One?", "answer": 7}])
        message = r"y.json: row 2: task math/\w+ is in .*row 1 with another prompt or answer"
        with pytest.raises(RecordError, match=message):
            self.distinct(path)

    def test_tasks_of_earlier_files_count(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "x.json", [self.ONE])
        earlier_tasks: dict[str, LocatedTask] = {}
        assert len(self.distinct(path, earlier_tasks)) == 1
        assert self.distinct(path, earlier_tasks) == []


def test_formats_that_are_not_in_formats_yaml_are_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = page.partition("## Data files")[2].partition("\n## ")[0]
    assert "(../rollout/tasks/formats.yaml)" in section
    names = [name for name, format in FORMATS.items() if not isinstance(format, Fields)]
    assert len(names) > 5
    assert not [name for name in names if f"`{name}`" not in section]


def test_an_integer_of_many_digits_is_an_answer(tmp_path: Path) -> None:
    number = 10**400
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "What?", "answer": number}))
    assert [task.answers for task in read(tmp_path / "x.jsonl", "plain")] == [(str(number),)]


def test_a_row_with_a_cell_too_many_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt,answer\nWhat is 2,3\nWhat is 2, 3?,5\n")
    with pytest.raises(RecordError, match=r"line 3 has more cells .* in double quotes"):
        list(read_rows(tmp_path / "x.csv"))


def test_columns_of_the_same_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt,answer,answer\nWhat?,5,6\n")
    with pytest.raises(RecordError, match=r"2 columns are called 'answer'; rename all but one"):
        list(read_rows(tmp_path / "x.csv"))


@pytest.mark.parametrize("answer", ["1e400", "-1e400", "[1e400]"])
def test_an_infinite_number_is_no_answer(answer: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"prompt": "What?", "answer": {answer}}}\n')
    with pytest.raises(RecordError, match=r"answer that is a float \(-?inf\)"):
        read(tmp_path / "x.jsonl", "plain")


def test_bytes_are_no_answer_and_a_float32_has_its_own_digits() -> None:
    with pytest.raises(RecordError, match=r"answer that is a bytes \(b'5'\)"):
        mm.load_tasks([{"prompt": "What?", "answer": b"5"}])
    (task,) = mm.load_tasks([{"prompt": "What?", "answer": np.float32(0.1)}])
    assert task.answers == ("0.1",)


@pytest.mark.parametrize(("sign", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_another_sign_than_a_comma_between_columns_is_named(
    tmp_path: Path, sign: str, name: str
) -> None:
    (tmp_path / "x.csv").write_text(f"question{sign}answer\nWhat is 2?{sign}2\n")
    with pytest.raises(
        RecordError, match=f"x.csv: its header .* has {name} between the columns; e"
    ):
        list(read_rows(tmp_path / "x.csv"))
    (tmp_path / "y.csv").write_text("question\nWhat is 2; or 3?\n")
    assert [*read_rows(tmp_path / "y.csv")] == [{"question": "What is 2; or 3?"}]


def test_lines_of_json_are_read_from_a_file_named_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": "1"}\n{"a": "2"}\n')
    assert list(read_rows(tmp_path / "x.json")) == [{"a": "1"}, {"a": "2"}]
    (tmp_path / "y.json").write_text('{"a": "1"}\n{"a": \n')
    with pytest.raises(RecordError, match=r"y\.json: line 2 cannot be read \(.*, column \d+\)$"):
        list(read_rows(tmp_path / "y.json"))


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("algebra\\intro", "plain/algebra_intro-"),
        ("a\nb", "plain/a_b-"),
        ("../../up", "plain/_/_/up-"),
        ("a/./b", "plain/a/_/b-"),
        ("v1.2/x..y", "plain/v1.2/x..y-"),
    ],
)
def test_an_id_that_is_no_name_of_files_is_made_one(name: str, end: str, tmp_path: Path) -> None:
    tasks = mm.load_tasks([{"id": name, "prompt": "What?", "answer": "5"}])
    assert tasks[0].id.startswith(end)
    write_tasks(tmp_path / "t.parquet", tasks)
    assert [task.id for task in read_tasks(tmp_path / "t.parquet")] == [tasks[0].id]


def test_values_of_pandas_are_read(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        [{"prompt": f"What {n}?", "answers": ["a", "b"], "id": n} for n in range(4)]
    )
    frame.to_parquet(tmp_path / "x.parquet")
    read_again = pd.read_parquet(tmp_path / "x.parquet")  # lists are arrays now
    assert [task.answers for task in mm.load_tasks(read_again)] == [("a", "b")] * 4
    assert [task.id.partition("-")[0] for task in mm.load_tasks(read_again)] == [
        f"plain/{n}" for n in range(4)
    ]
    assert {task.answers for tasks in split_tasks(read_again).values() for task in tasks} == {
        ("a", "b")
    }
    numbers = pd.DataFrame({"prompt": ["What?"], "answer": np.array([7], dtype=np.int32)})
    assert [task.answers for task in mm.load_tasks(numbers.to_dict("records"))] == [("7",)]
