"""`mcore-mas show`: trajectories in the terminal, and trees by their best path or with all branches."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mcore_mas.cli.main import main
from mcore_mas.runtime.error_description import describe_error
from mcore_mas.tracking.progress import ProgressReporter
from rollout.base.terminal import say
from rollout.records.files import read_trajectories, write_tasks, write_trajectories
from rollout.records.trajectory import Message, ToolEvent
from rollout.teams.tree import Branching
from tests.support.play import SEED, STEP, TASK, Adder, collect, make_team, seeded
from tests.support.played import failed, trajectory, turn

REPLIES = {
    ("a", 0, ""): "1",
    ("a", 0, "1"): "5",
    ("a", 1, ""): "3",
    ("a", 1, "1.0"): "2",
    ("a", 1, "1.1"): "4",
}


async def two_turns(task, team, env):
    """Play two turns of agent a, each with a call of a tool."""
    observation = env.reset(task)
    for _ in range(2):
        reply = await team.act("a", said=observation)
        await env.step(f"look {reply.text}")
        step = await env.step(reply.text)
        observation = step.observation


def record(path, tree):
    """Write the trajectory of two turns, or its tree, to a file; return the file."""
    engine, _ = seeded(REPLIES)
    [group] = asyncio.run(
        collect(
            [TASK],
            make_team(engine),
            Adder,
            two_turns,
            group_size=1,
            seed=SEED,
            step=STEP,
            tree=tree,
        )
    )
    write_trajectories(path, group.trajectories)
    assert read_trajectories(path)[0].tools == group.trajectories[0].tools
    return path


def show(capsys, monkeypatch, *arguments, columns=160) -> str:
    """Return the output of `mcore-mas show` with these arguments."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.argv", ["mcore-mas", "show", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    return capsys.readouterr().out


def titles(text):
    """Return the title of every turn."""
    return [line.strip("│ ") for line in text.splitlines() if "(p v0)" in line]


@pytest.fixture
def tree(tmp_path):
    return record(tmp_path / "tree.parquet", Branching(width=2))


def test_a_trajectory_shows_every_turn_with_its_scores(tmp_path, capsys, monkeypatch):
    text = show(capsys, monkeypatch, record(tmp_path / "line.parquet", None))
    assert "completed   outcome 4   2 turns" in text
    assert titles(text) == [
        "0 a (p v0) · 2 tokens, log p 0.00 · team 1 · total 1",
        "1 a (p v0) · 2 tokens, log p 0.00 · team 3 · total 4",
    ]
    assert text.count("eye: look") == 2


def test_a_tree_shows_its_best_path(tree, capsys, monkeypatch):
    text = show(capsys, monkeypatch, tree)
    assert "completed   outcome 9   2 turns on the path to 1.1, 4 in the tree" in text
    assert titles(text) == [
        "0 a (p v0) · branch 1 · 2 tokens, log p 0.00 · team 5 · total 5 · branch 5",
        "1 a (p v0) · branch 1.1 · 2 tokens, log p 0.00 · team 4 · total 9 · branch 4",
    ]
    assert "eye: look 5" in text
    assert "eye: look 1" not in text


def test_branches_shows_the_siblings_with_their_scores(tree, capsys, monkeypatch):
    text = show(capsys, monkeypatch, tree, "--branches")
    assert [title.split(" · ")[1] for title in titles(text)] == [
        "branch 0",
        "branch 1",
        "branch 1.0",
        "branch 1.1",
    ]
    assert [title.split(" · ")[-1] for title in titles(text)] == [
        "branch 1",
        "branch 5",
        "branch 2",
        "branch 4",
    ]
    assert text.count("user → a") == 2  # siblings have the same prompt
    assert text.count("eye: look") == 4


def test_the_command_below_a_list_is_one_line_however_narrow_the_terminal(
    tmp_path, capsys, monkeypatch
):
    path = tmp_path / f"{'long' * 20}.parquet"
    write_trajectories(path, [trajectory(turn(0)), trajectory(turn(0), id="second")])
    text = show(capsys, monkeypatch, path, columns=40)
    assert text.splitlines()[-1] == f"mcore-mas show {path} --index 1"


@pytest.mark.parametrize("columns", [80, 40])
def test_the_numbers_of_a_list_are_never_cut(tmp_path, capsys, monkeypatch, columns):
    path = tmp_path / "step.parquet"
    reward = replace(turn(0), reward=-0.8125)
    trajectories = [
        trajectory(reward, id=f"t{number}", sample=number, task_id="question " * 8, outcome=0.625)
        for number in range(12)
    ]
    failure = failed(turn(0), sample=12)
    write_trajectories(
        path, [*trajectories, replace(failure, error="EngineError: " + "long " * 20)]
    )
    lines = show(capsys, monkeypatch, path, columns=columns).splitlines()
    rows = [line.split("│") for line in lines if line.count("│") == 7]
    assert [cell.strip() for cell in rows[11][2:6]] == ["11", "1", "0.625", "-0.812"]
    if columns == 80:
        headings = [heading.strip() for heading in lines[0].split("┃")]
        assert headings[2:-1] == ["sample", "turns", "outcome", "reward", "advantage"]
        assert all(len(line) <= 80 for line in lines[:-1])


HOSTILE = "\x1b]0;owned\x07 \x1b[2J \x9b2J a\rb \x1b]52;c;aGk=\x07 \u202eevil\u202c\ttab"


def test_control_characters_of_a_trajectory_are_escaped(capsys, monkeypatch, tmp_path) -> None:
    hostile = trajectory(
        turn(0, text=HOSTILE, messages=(Message(role="user", content=HOSTILE),)),
        tools=(ToolEvent(after_turn=0, tool="python", query=HOSTILE, result=HOSTILE),),
        error=HOSTILE,
    )
    write_trajectories(tmp_path / "hostile.parquet", [hostile])
    text = show(capsys, monkeypatch, tmp_path / "hostile.parquet")
    assert not set(text) & set("\x1b\x07\r\x9b\u202e\u202c")
    # in the prompt, the reply, the query, the tool's result and the error
    assert text.count("\\x1b]0;owned\\x07") == 5


def test_control_characters_of_a_note_are_escaped(capsys) -> None:
    ProgressReporter("r train", 3).note(f"first: {HOSTILE}\r\nr train: 3/3 done")
    note = capsys.readouterr().err
    assert note.count("\n") == 1
    assert note.endswith("\\r\\nr train: 3/3 done\n")

    say(f"retriever: {HOSTILE}\nr train: 3/3 done")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "retriever: \\x1b]0;owned" in line
    assert not set(note + line) & set("\x1b\x07\r\x9b\u202e")
    assert describe_error(ValueError(HOSTILE)).startswith("ValueError: \\x1b]0;owned")


def test_a_file_of_several_is_listed_and_everything_fits_80_columns(
    capsys, monkeypatch, tmp_path
) -> None:
    trajectories = [
        replace(
            trajectory(replace(turn(0), reward=0.25), replace(turn(1), reward=0.75)),
            id="3/t/0",
            outcome=1.0,
        ),
        replace(failed(turn(0), sample=1), id="3/t/1"),
    ]
    write_trajectories(tmp_path / "step_000003.parquet", trajectories)
    text = show(capsys, monkeypatch, tmp_path / "step_000003.parquet", columns=80)
    rows = [line.split() for line in text.splitlines() if line.strip().partition(" ")[0].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "2"]  # two trajectories, and their number
    assert "0.5" in rows[0]  # the mean of 0.25 and 0.75
    assert "completed" in rows[0]
    assert "failed: EngineError" in " ".join(rows[1])
    details = show(
        capsys, monkeypatch, tmp_path / "step_000003.parquet", "--index", "1", columns=80
    )
    assert details.startswith("step 1   task t   sample 0   source")
    assert "reward 0.25" in " ".join(details.replace("│", " ").split())
    # the last line of the list is a command, which must stay one line
    lines = text.splitlines()[:-1] + details.splitlines()
    assert max(map(len, lines)) <= 80


def test_a_list_has_the_questions_of_the_runs_tasks(capsys, monkeypatch, tmp_path) -> None:
    task = replace(TASK, id="plain/3ec6e667f385", prompt="How many\nnails?" + " Count them." * 9)
    write_tasks(tmp_path / "tasks" / "train.parquet", [task])
    file = tmp_path / "train" / "trajectories" / "step_000003.parquet"
    played = [trajectory(turn(0), task_id=task.id, step=step, id=f"{step}") for step in (3, -2)]
    write_trajectories(file, played)
    text = show(capsys, monkeypatch, file, columns=100)
    assert text.count("How many nails? Count them.") == 2
    assert task.id not in text
    assert show(capsys, monkeypatch, file, "--index", "2").startswith("evaluation   task plain/3ec")


def test_branches_shows_the_alternatives_of_a_turn(tmp_path, capsys, monkeypatch):
    path = tmp_path / "step_000000.parquet"
    alternative = turn(0, scores={"replay_outcome": 7.0}, node="1", text="other")
    write_trajectories(path, [trajectory(turn(0, text="mine"), alternative)])
    assert "other" not in show(capsys, monkeypatch, path)
    text = show(capsys, monkeypatch, path, "--branches")
    assert "1 turns, and 1 alternatives to them" in text
    assert "alternative 1 · 1 tokens, log p 0.00 · replay_outcome 7" in text


def test_a_tree_without_a_best_attempt_has_no_turns_on_its_path(tmp_path, capsys, monkeypatch):
    path = tmp_path / "step_000000.parquet"
    write_trajectories(path, [trajectory(turn(0, node="0"), turn(1, node="1"))])
    assert "0 turns on the path, 2 in the tree" in show(capsys, monkeypatch, path)


def test_a_tool_call_before_the_first_turn_is_shown_first(tmp_path, capsys, monkeypatch):
    path = tmp_path / "step_000000.parquet"
    listing = ToolEvent(after_turn=-1, tool="files", query="", result="data.csv")
    write_trajectories(path, [trajectory(turn(0, text="reads it"), tools=(listing,))])
    text = show(capsys, monkeypatch, path)
    assert 0 < text.index("data.csv") < text.index("reads it")


def test_the_tools_of_an_agent_are_named_where_it_first_speaks(
    tmp_path, capsys, monkeypatch
) -> None:
    file = tmp_path / "run" / "train" / "trajectories" / "step_000000.parquet"
    file.parent.mkdir(parents=True)
    config = tmp_path / "run" / "config.yaml"
    config.write_text("agents: {a: {tools: {python: {}, search: {}}}, b: {tools: {}}}")
    text = show(capsys, monkeypatch, record(file, None))
    assert text.count("tools of a: python, search") == 1
    assert "tools of b" not in text
    config.write_text("- not a config")
    assert "tools of" not in show(capsys, monkeypatch, file)
