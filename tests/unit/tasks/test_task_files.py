"""Published data files in their own shapes, and what becomes of their rows."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.records.files import RecordError, write_tasks
from rollout.records.trajectory import Task
from rollout.tasks.fields import Fields
from rollout.tasks.files import FORMATS, distinct_tasks, read_task_file
from rollout.tasks.rows import read_rows

DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(found), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in found))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, found[0])
            writer.writeheader()
            writer.writerows(found)
    else:
        path.write_text(json.dumps(found))
    return path


def load(path: Path, format: str, **options: str) -> list[Task]:
    return [
        located.task for located in read_task_file(path, format=format, split="test", **options)
    ]


def digest(question: str) -> str:
    return hashlib.blake2b(question.encode(), digest_size=6).hexdigest()


def verl(prompt: Any, truth: Any, **rest: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        **rest,
    }


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("format", "suffix", "row", "task"),
    [  # the row as published; id without its digest, question, answers
        (
            "dapo",
            ".parquet",
            verl(
                user(f"{DAPO_HEAD}What is 2+2?{DAPO_TAIL}"),
                "4",
                data_source="math_dapo",
                extra_info={"index": "9a9b6eb4"},
            ),
            ("math_dapo/9a9b6eb4", "What is 2+2?", ("4",)),
        ),
        (
            "dapo",
            ".parquet",
            verl(
                user(
                    "What is 2+2?\n\nLet's think step by step and output the final answer within \\boxed{}."
                ),
                "4",
            ),
            ("dapo", "What is 2+2?", ("4",)),
        ),
        (
            "math",
            ".parquet",
            verl(
                user("Ignored."),
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
                **verl(
                    user("Answer the given question. Question: total ..."), {"target": ["2,718"]}
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
                **verl(
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
def test_a_published_row(
    tmp_path: Path, format: str, suffix: str, row: dict[str, Any], task: tuple[Any, ...]
) -> None:
    named, question, answers = task
    (found,) = load(write(tmp_path / f"x{suffix}", [row]), format)
    own = digest(question)
    assert found == Task(
        id=f"{named}-{own}" if "/" in named else f"{named}/{own}",
        prompt=question,
        answers=answers,
        env=FORMATS[format].env,
        source=named.partition("/")[0],
        split="test",
    )


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_a_mark_of_windows_at_the_beginning_is_passed_over(tmp_path: Path, name: str) -> None:
    text = {"x.jsonl": '{"a": "1"}', "x.json": '[{"a": "1"}]', "x.csv": "a\n1\n"}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert list(read_rows(tmp_path / name)) == [{"a": "1"}]


def test_half_a_character_becomes_the_sign_for_one(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        '{"prompt": "a \\ud83d b", "answer": "1"}'
    )  # a text that was cut by its length
    assert [task.prompt for task in load(tmp_path / "x.jsonl", "plain")] == ["a \ufffd b"]


def test_ids_stay_when_rows_move(tmp_path: Path) -> None:
    pair = [{"problem": "One?", "answer": 1}, {"problem": "Two?", "answer": 2}]
    first = load(write(tmp_path / "a.json", pair), "math")
    second = load(write(tmp_path / "b.parquet", pair[::-1]), "math", source="mine")
    assert [task.id for task in first] == [f"math/{digest('One?')}", f"math/{digest('Two?')}"]
    assert [task.id for task in second] == [f"mine/{digest('Two?')}", f"mine/{digest('One?')}"]


@pytest.mark.parametrize(
    ("format", "row", "words"),
    [
        (
            "math_500",
            {"question": "?", "answer": 1},
            "has no question: expected one of problem to be filled; its columns: question, answer",
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
            "has an answer that is a bool; expected text, a number or a list",
        ),
        (
            "math",
            {"problem": "?", "solution": "so it is" * 60},
            "has no final answer of 1 to 400 characters",
        ),
        ("math", {"problem": "?", "solution": "\\boxed{4"}, "has no final answer"),
        (
            "dapo",
            verl([{"role": "system", "content": "x"}], "1"),
            "has a question that is neither text nor a conversation with one user message",
        ),
        (
            "dapo",
            verl(user("a") + user("b"), "1"),
            "has a question that is neither text nor a conversation with one user message",
        ),
    ],
)
def test_a_row_of_another_shape(
    tmp_path: Path, format: str, row: dict[str, Any], words: str
) -> None:
    good = {
        "problem": "Q",
        "question": "Q",
        "prompt": "Q",
        "answer": "1",
        "reward_model": {"ground_truth": "1"},
    }
    path = write(tmp_path / "x.jsonl", [good, row])
    with pytest.raises(RecordError) as caught:
        load(path, format)
    assert str(caught.value).startswith(f"{path}: row 1 of format {format} {words}")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", '{"a": 1}\n\n{"a":', "x.jsonl: line 3 cannot be read"),
        ("x.jsonl", '{"a": 1}\n[2]', "row 1 is a list; expected an object with columns"),
        ("x.json", '{"rows": []}', "expected a list of rows, or an object with one under 'data'"),
        ("x.json", "[", "x.json: cannot be read"),
        ("x.parquet", "PAR0", "x.parquet: cannot be read"),
        ("x.npy", "", "x.npy: expected a file named .parquet, .jsonl, .json, .csv"),
        ("x.csv", None, "x.csv: no such file"),
    ],
)
def test_a_file_that_cannot_be_read(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(RecordError, match=words):
        list(read_rows(tmp_path / name))


def test_a_long_cell_of_a_table_is_read_and_the_process_keeps_its_limit(tmp_path: Path) -> None:
    usual = csv.field_size_limit()
    (tmp_path / "x.csv").write_text(f"question,answer\n{'x' * 200_000},1\n,2\n")
    assert [len(row["question"]) for row in read_rows(tmp_path / "x.csv")] == [200_000, 0]
    assert csv.field_size_limit() == usual == 131_072


def test_rows_under_data(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"Version": 1.0, "Data": [{"a": 1}]}')
    assert list(read_rows(tmp_path / "x.json")) == [{"a": 1}]


def test_long_cells_are_read_and_the_process_keeps_its_own_limit(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    path = write(tmp_path / "x.csv", [{"a": "x" * (before + 1)}])
    assert [len(row["a"]) for row in read_rows(path)] == [before + 1]
    assert csv.field_size_limit() == before


def test_own_files_keep_ids_sources_and_splits(tmp_path: Path) -> None:
    task = Task(id="t/1", prompt="?", answers=("1",), env="math", source="t", split="train")
    write_tasks(tmp_path / "x.parquet", [task])
    assert load(tmp_path / "x.parquet", "tasks") == [task]


def test_what_repeats(tmp_path: Path) -> None:
    one, two = {"problem": "One?", "answer": 1}, {"problem": "Two?", "answer": 2}
    path = write(tmp_path / "x.json", [one, two, one])
    with pytest.raises(
        RecordError,
        match=r"row 2: task math/\w+ is in .*x.json: row 0 already; set data.duplicates",
    ):
        list(distinct_tasks(read_task_file(path, format="math", split="test"), {}, drop=False))
    kept = list(distinct_tasks(read_task_file(path, format="math", split="test"), {}, drop=True))
    assert [task.prompt for task in kept] == ["One?", "Two?"]
    other = write(tmp_path / "y.json", [one, {"problem": "One?", "answer": 7}])
    with pytest.raises(
        RecordError,
        match=r"y.json: row 1: task math/\w+ is in .*row 0 with another prompt or answer",
    ):
        list(distinct_tasks(read_task_file(other, format="math", split="test"), {}, drop=True))


def test_the_same_file_twice_repeats(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", [{"problem": "One?", "answer": 1}])
    seen: dict[str, Any] = {}
    assert (
        len(
            list(distinct_tasks(read_task_file(path, format="math", split="test"), seen, drop=True))
        )
        == 1
    )
    assert not list(
        distinct_tasks(read_task_file(path, format="math", split="test"), seen, drop=True)
    )


def test_every_format_without_a_table_of_columns_is_documented() -> None:
    """The page links to formats.yaml for the columns of the others."""
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = page.partition("## Data files")[2].partition("\n## ")[0]
    assert "(../rollout/tasks/formats.yaml)" in section
    names = [name for name, one in FORMATS.items() if not isinstance(one, Fields)]
    assert len(names) > 5 and not [name for name in names if f"`{name}`" not in section]
