"""The data-science pipeline in the real sandbox, on a table of y = 2 x + 1: files handed on, rewards by hand."""

from __future__ import annotations

import asyncio
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollout.base.errors import EnvError
from rollout.environments.data_science import DataScienceEnv, pack_file, pack_target, unpack_answers
from rollout.environments.predictions import Target
from rollout.environments.protocol import Step
from rollout.records.files import RecordError, read_trajectories, write_trajectories
from rollout.records.trajectory import Status, Task, Trajectory
from rollout.sandbox import Sandbox
from rollout.tasks.generators import GENERATORS
from rollout.tasks.tabular import TableModel, metric_of
from tests.support.casts import play, scores, speakers, validity

ROLES = {"engineer": "data_engineer", "modeler": "modeler", "analyst": "analyst"}
TARGET = Target(
    metric="mae",
    id_column="id",
    column="y",
    truth={"3": "7.0", "4": "9.0"},
    baseline=4.0,
    ceiling=0.0,
)
TASK = Task(
    id="t",
    prompt="Predict y.",
    answers=(
        pack_file("train.csv", "id,x,y\n1,1,3\n2,2,5\n"),
        pack_file("test.csv", "id,x\n3,3\n4,4\n"),
        pack_target(TARGET),
    ),
    env="data_science",
    source="s",
    split="train",
)
NONE = "no idea"


def code(program: str) -> str:
    return f"<think>hm</think>I do my part.\n```python\n{program}\n```"


CLEAN = code(
    """import csv, pickle
rows = list(csv.DictReader(open("train.csv")))
for name, data in (
    ("X_train", [float(row["x"]) for row in rows]),
    ("y_train", [float(row["y"]) for row in rows]),
    ("X_test", [(row["id"], float(row["x"])) for row in csv.DictReader(open("test.csv"))]),
):
    pickle.dump(data, open(name + ".pkl", "wb"))"""
)
LOOK = code("import os; print(sorted(os.listdir()))\nkept = 1")
FIT = code(
    """import pickle, statistics
x, y = (pickle.load(open(name + "_train.pkl", "rb")) for name in "Xy")
pickle.dump(tuple(statistics.linear_regression(x, y)), open("model.pkl", "wb"))"""
)
SUBMIT = code(
    """import pickle
slope, intercept = pickle.load(open("model.pkl", "rb"))
lines = [f"{key},{slope * x + intercept}" for key, x in pickle.load(open("X_test.pkl", "rb"))]
open("submission.csv", "w").write("\\n".join(["id,y", *lines]))"""
)


def run(
    box: Sandbox, *replies: str, task: Task = TASK, reward: str = "normalised", **options: Any
) -> tuple[Trajectory, list[str]]:
    make_env = partial(DataScienceEnv, sandbox=box, reward=reward, memory_mb=256, disk_mb=8)
    return play("dsbench", ROLES, *replies, task=task, make_env=make_env, **options)


def test_files_go_from_agent_to_agent_until_the_submission_is_scored(box: Sandbox) -> None:
    trajectory, prompts = run(box, LOOK, CLEAN, FIT, SUBMIT)
    assert speakers(trajectory) == ["engineer", "engineer", "modeler", "analyst"]
    assert scores(trajectory) == [0.0, 1.0, 1.0, 1.0]
    assert (trajectory.outcome, trajectory.status) == (1.0, Status.COMPLETED)  # exp(-0 / 10)
    metrics = trajectory.metrics
    assert metrics["mae"] == 0.0
    assert metrics["normalised"] == metrics["submitted"] == metrics["solved"] == 1.0

    assert "test.csv (13)\ntrain.csv (19)" in prompts[0]
    assert "['test.csv', 'train.csv']" in prompts[1]
    assert "print(sorted(os.listdir()))" in prompts[1]
    # The next agent reads the last reply without its thought, and no earlier program.
    assert "## engineer\nI do my part." in prompts[2]
    assert "hm" not in prompts[2]
    assert "os.listdir" not in prompts[2]
    assert "X_test.pkl" in prompts[2]
    assert "model.pkl (" in prompts[3]
    # No prompt has a truth.
    assert not [prompt for prompt in prompts if "7.0" in prompt or "9.0" in prompt]

    runs = [event for event in trajectory.tools if event.tool == "python"]
    assert [event.after_turn for event in runs] == [0, 1, 2, 3]
    # Coaches read the listings of the folder.
    listings = [event for event in trajectory.tools if event.tool == "files"]
    assert [event.after_turn for event in listings] == [-1, 0, 1, 2, 3]
    names_by_listing = [event.result.split("\n") for event in listings]
    assert [len(names) for names in names_by_listing] == [2, 2, 5, 6, 7]
    assert names_by_listing[3] == [
        "X_test.pkl",
        "X_train.pkl",
        "model.pkl",
        "test.csv",
        "train.csv",
        "y_train.pkl",
    ]


def test_files_of_any_name_are_shown_and_the_submission_is_scored(
    box: Sandbox, tmp_path: Path
) -> None:
    odd = code("import os\nopen(b'\\xff.csv', 'w')\nopen('\\x1b[2J', 'w')")
    many = code("for n in range(1500): open(f'{n:04}' + 'x' * 240, 'w')")
    write = code("open('submission.csv', 'w').write('id,y\\n3,7\\n4,9\\n')")
    artefacts = {"engineer": [], "modeler": [], "analyst": ["submission.csv"]}
    trajectory, prompts = run(box, odd, many, write, artefacts=artefacts)
    assert (trajectory.status, trajectory.outcome) == (Status.COMPLETED, 1.0)
    assert "\N{REPLACEMENT CHARACTER}.csv" in prompts[1]
    write_trajectories(tmp_path / "odd.parquet", [trajectory])
    assert read_trajectories(tmp_path / "odd.parquet") == [trajectory]


def test_variables_stay_with_their_agent_and_files_do_not(box: Sandbox) -> None:
    look = code("print('kept' in dir(), open('note.txt').read())")
    note = code("kept = 1; open('note.txt', 'w').write('here')")
    stages = {"engineer": ["a.txt"], "modeler": ["b.txt"]}
    trajectory, prompts = run(box, note, look, look, NONE, max_turns=2, artefacts=stages)
    printed = [event.result for event in trajectory.tools if event.tool == "python"]
    assert printed == ["4", "True here", "False here"]
    assert "There was no program." not in prompts[3]
    assert (scores(trajectory), validity(trajectory)) == ([0.0] * 4, [True, True, True, False])
    assert (trajectory.outcome, trajectory.answer) == (0.0, "")
    assert (trajectory.metrics["submitted"], trajectory.metrics["malformed_submission"]) == (
        0.0,
        0.0,
    )


def test_a_failing_program_is_shown_and_the_next_agent_asked_after_four_turns(box: Sandbox) -> None:
    broken = code("1 / 0")
    write = code("open('submission.csv', 'w').write('id,y\\n3,7\\n4,5\\n')")
    trajectory, prompts = run(box, *[broken] * 4, NONE, FIT, NONE, FIT, write)
    assert speakers(trajectory) == ["engineer"] * 4 + ["modeler"] * 4 + ["analyst"]
    assert "ZeroDivisionError" in prompts[1] and "There was no program." in prompts[5]
    assert (trajectory.outcome, trajectory.metrics["mae"]) == (pytest.approx(math.exp(-0.2)), 2.0)
    gap, _ = run(box, write, reward="gap", artefacts={"analyst": ["submission.csv"]})
    assert gap.outcome == 0.5  # (2 - 4) / (0 - 4)


def test_a_malformed_submission_has_its_own_reward(box: Sandbox) -> None:
    write = code("open('submission.csv', 'w').write('id,y\\n3,7\\n')")
    make_env = partial(DataScienceEnv, sandbox=box, malformed=-1.0)
    stages = {"analyst": ["submission.csv"]}
    trajectory, _ = play("dsbench", ROLES, write, task=TASK, make_env=make_env, artefacts=stages)
    assert trajectory.outcome == -1.0
    assert (trajectory.metrics["submitted"], trajectory.metrics["malformed_submission"]) == (
        1.0,
        1.0,
    )
    assert "mae" not in trajectory.metrics


def test_truths_are_nowhere_in_the_sandbox(box: Sandbox) -> None:
    """Not in its files, nor in what a program can see of its own process."""
    search = code(
        """import gc, os
text = "".join(open(name).read() for name in os.listdir())
here = [o for o in gc.get_objects() if isinstance(o, dict) and "truth" in o]
print("7.0" in text, len(here), os.environ.get("truth"))"""
    )
    trajectory, _ = run(box, search, max_turns=1, artefacts={"engineer": []})
    assert trajectory.tools[1].result == "False 0 None"


def steps(box: Any, *actions: str, task: Task = TASK, **options: Any) -> list[Step]:
    async def play_all() -> list[Step]:
        env = DataScienceEnv(task, sandbox=box, memory_mb=256, **options)
        try:
            await env.open(task)
            env.reset(task)
            return [await env.step(action) for action in actions]
        finally:
            await env.close()

    return asyncio.run(play_all())


def test_one_agent_can_step_it_too(box: Sandbox) -> None:
    write = code("open('submission.csv', 'w').write('id,y\\n3,7\\n4,9\\n')")
    first, second, last = steps(box, code("print(40 + 2)"), "hello", write, max_turns=3)
    assert first.observation == "42"
    assert not first.done
    assert first.tools[0].tool == "python"
    assert second.observation == "There was neither a program nor <submit>."
    assert not second.done
    assert last.done
    assert last.reward == 1.0
    assert last.metrics["solved"] == 1.0
    assert steps(box, "<submit>")[0].metrics["submitted"] == 0.0


def test_thoughts_about_the_submission_do_not_submit(box: Sandbox) -> None:
    thought = "<think>First look, then <submit>.</think>"
    [step] = steps(box, thought + code("print(40 + 2)"))
    assert (step.observation, step.done) == ("42", False)


def test_tasks_with_damaged_files_fail_the_trajectory(box: Sandbox) -> None:
    with pytest.raises(EnvError, match="used before open"):
        asyncio.run(DataScienceEnv(TASK, sandbox=box).files())
    for answers in (
        ("{}",),
        ("no json",),
        (pack_file("a", "b"),),
        (json.dumps({"file": "a", "path": "/no/such"}),),
    ):
        with pytest.raises(EnvError, match="task t"):
            unpack_answers(
                Task(id="t", prompt="", answers=answers, env="", source="", split="test")
            )
    odd = Task(
        id="t",
        prompt="",
        answers=(pack_file("../a", "b"), pack_target(TARGET)),
        env="",
        source="",
        split="test",
    )
    with pytest.raises(EnvError, match=r"file \.\./a cannot be put into the sandbox"):
        steps(box, "x", task=odd)


SOLVE = """import csv
level = {"low": 0, "middle": 1, "high": 2}
def rows(name):
    return list(csv.DictReader(open(name)))
train, test = rows("train.csv"), rows("test.csv")
target = list(train[0])[-1]
names = [n for n in test[0] if n not in ("id", "level")]
def vector(row):
    return [float(row[n] or 0) for n in names] + [float(level[row["level"]] == k) for k in range(3)]
X = [vector(r) for r in train]
y = [float(r[target]) for r in train]
n = len(X[0])
A = [[sum(r[i] * r[j] for r in X) + (i == j) * 1e-6 for j in range(n)] + [sum(r[i] * t for r, t in zip(X, y))]
     for i in range(n)]
for i in range(n):  # Gauss-Jordan
    A[i] = [v / A[i][i] for v in A[i]]
    for k in range(n):
        if k != i:
            A[k] = [a - A[k][i] * b for a, b in zip(A[k], A[i])]
w = [row[-1] for row in A]
with open("submission.csv", "w") as file:
    print("id", target, sep=",", file=file)
    for r in test:
        v = sum(a * b for a, b in zip(w, vector(r)))
        print(r["id"], v if target == "y" else round(min(max(v, 0), 1)), sep=",", file=file)
"""


def test_generated_tables_are_solved_by_the_standard_library(box: Sandbox) -> None:
    tasks = GENERATORS["tabular"].tasks(1, {"train": 4, "test": 2})
    for task in tasks:
        _, target = unpack_answers(task)
        assert target.beats_baseline(target.ceiling)
        [end] = steps(box, code(SOLVE), task=task, reward="gap", max_turns=1)
        assert end.metrics["solved"] == 1.0
        # share of the gap that linear least squares reaches
        assert 0.5 < end.reward < 1.3, (task.id, target.metric)


def test_generated_tables_are_a_function_of_the_seed_and_all_differ() -> None:
    sizes = {"train": 30, "validation": 5, "test": 5}
    generate = partial(GENERATORS["tabular"].tasks, train_rows=10, test_rows=10)
    tasks = generate(1, sizes) + generate(2, sizes)
    assert generate(1, sizes) == tasks[:40]
    assert len({task.id for task in tasks}) == 80
    assert {task.source for task in tasks} == {"tabular_regression", "tabular_classification"}


def test_a_signal_is_the_weighted_sum_with_the_effect_of_the_level() -> None:
    model = TableModel(
        kind="regression", metric="mae", weights=(2, 0), intercept=1, effects=(0, 4, -4)
    )
    assert [model.signal([1.5, 9.0], level) for level in range(3)] == [4.0, 8.0, 0.0]


EVALUATION = """
from sklearn.metrics import accuracy_score
parser.add_argument('--value', type=str, default="Survived")
performance = accuracy_score(actual[args.value], submission[args.value])
"""


def folder(root: Path) -> Path:
    """Return a folder in DSBench's layout, with a task of one column, one of several, and one that cannot be scored."""
    (root / "data.json").write_text(
        '{"name": "titanic", "size": "1"}\n{"name": "wide"}\n{"name": "odd"}\n'
    )
    files = {
        "evaluation/titanic_eval.py": EVALUATION,
        "evaluation/wide_eval.py": "performance = rmsle(predictions, answers)\n",
        "evaluation/odd_eval.py": "performance = luck(predictions, answers)\n",
        "data/data_resplit/odd/sample_submission.csv": "id,a\n1,0\n",
        "data/answers/odd/test_answer.csv": "id,a\n1,0\n",
        "data/task/titanic.txt": "Who survived?\n",
        "data/task/wide.txt": "Several.",
        "data/data_resplit/titanic/train.csv": "PassengerId,Age,Survived\n1,30,1\n",
        "data/data_resplit/titanic/test.csv": "PassengerId,Age\n2,40\n3,50\n",
        "data/data_resplit/titanic/sample_submission.csv": "PassengerId,Survived\n2,0\n3,0\n",
        "data/answers/titanic/test_answer.csv": "PassengerId,Age,Survived\n2,40,1\n3,50,0\n",
        "data/data_resplit/wide/sample_submission.csv": "id,a,b\n1,0,0\n",
        "data/answers/wide/test_answer.csv": "id,a,b\n1,0,0\n",
        "save_performance/baseline/titanic/result.txt": "0.5",
        "save_performance/GT/titanic/result.txt": "0.9\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_dsbenchs_own_folder_is_read_and_its_scripts_are_not_run(
    tmp_path: Path, box: Sandbox
) -> None:
    options = {"folder": str(folder(tmp_path))}
    tasks = GENERATORS["dsbench"].tasks(1, {"train": 0, "test": 2}, **options)
    task, wide = sorted(tasks, key=lambda task: task.id)
    _, several = unpack_answers(wide)
    assert (several.metric, several.columns, several.truth) == (
        "rmsle",
        ["a", "b"],
        {"1": ["0", "0"]},
    )
    assert (task.id, task.env, task.split, task.source) == (
        "dsbench/titanic",
        "data_science",
        "test",
        "dsbench",
    )
    assert task.prompt.startswith("Who survived?\n\n")
    files, target = unpack_answers(task)
    assert sorted(files) == ["sample_submission.csv", "test.csv", "train.csv"]
    assert (target.metric, target.column, target.truth) == (
        "accuracy",
        "Survived",
        {"2": "1", "3": "0"},
    )
    assert (target.baseline, target.ceiling) == (0.5, 0.9)
    [end] = steps(box, "<submit>", task=task, reward="gap")
    assert end.reward == 0.0
    write = code("open('submission.csv', 'w').write('PassengerId,Survived\\n2,1\\n3,0\\n')")
    [end] = steps(box, f"{write}", task=task, reward="gap", max_turns=1)
    assert end.reward == pytest.approx(1.25)  # (1 - 0.5) / (0.9 - 0.5)
    with pytest.raises(ValueError, match=r"3 tasks asked for, but .* has 2 that can be scored"):
        GENERATORS["dsbench"].tasks(1, {"test": 3}, **options)
    (tmp_path / "data" / "task" / "titanic.txt").unlink()
    with pytest.raises(RecordError, match=r"titanic\.txt: cannot be read"):
        GENERATORS["dsbench"].tasks(1, {"test": 1}, **options)
    with pytest.raises(RecordError, match="expected DSBench's data_modeling folder"):
        GENERATORS["dsbench"].tasks(1, {"test": 1}, folder=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("script", "metric"),
    [
        ("performance = np.sqrt(mean_squared_error(a, b))", "rmse"),
        ("from sklearn.metrics import roc_auc_score\nperformance = rmsle(a, b)", "rmsle"),
        ("performance = np.sqrt(mean_squared_log_error(a, b))", "rmsle"),
        ("performance =mean_squared_error(a, b)", "mse"),
        ("performance = mean_absolute_error(a, b)", "mae"),
        ("    performance = roc_auc_score(a, b)", "auc"),
        ("performance = (a == b).mean()", "accuracy"),
        # equal to the accuracy if every row has one label
        ("performance = f1_score(a, b, average='micro')", "accuracy"),
        ("performance = f1_score(a, b, average='macro')", "f1"),
        (
            "from sklearn.metrics import roc_auc_score\nperformance = mean_spearmanr(a, b)",
            "spearman",
        ),
        ("from sklearn.metrics import accuracy_score", None),
    ],
)
def test_the_metric_is_read_from_the_evaluation_script(script: str, metric: str | None) -> None:
    assert metric_of(script) == metric
