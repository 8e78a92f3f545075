"""Pictures of games: the board of a trajectory's puzzle before and after each step, as SVG."""

import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from mcore_mas.reports.page_templates import render_page
from mcore_mas.reports.trajectory_files import read_run_tasks, select_trajectory
from rollout.base.files import write_text
from rollout.environments.games import GAMES
from rollout.environments.games.game import BadPuzzle
from rollout.orchestras.replies import parse_decided, parse_listed
from rollout.records.files import RecordError, read_trajectories
from rollout.records.trajectory import Task, ToolEvent, Trajectory, Turn

_SQUARE_SIZE = 24  # pixels
_BOARD_GAP = 16  # pixels


def write_game_pictures(
    file: Path, out: Path, *, index: int = 0, trajectory_id: str | None = None
) -> list[Path]:
    """Write pictures of trajectories of a file; return their paths.

    Args:
        file: file of trajectories in a run's folder.
        out: a path that ends in .svg for one trajectory, or a folder for all of them.
        index: index of the trajectory, counted from 0, if `out` is a file.
        trajectory_id: id of the trajectory, if `out` is a file; takes precedence over `index`.

    Raises:
        RecordError: the file is not a file of trajectories, lies in no run's folder, or lacks the
            trajectory; the task of a trajectory is not among the run's tasks, or is no puzzle of a game;
            or `out` is no folder and has another suffix than .svg.
        BadPuzzle: a task's prompt is not a puzzle of its game.
    """
    if out.suffix not in ("", ".svg") and not out.is_dir():
        raise RecordError(f"{out}: pictures are SVG; name a file that ends in .svg, or a folder")
    tasks = {task.id: task for task in read_run_tasks(file)}
    trajectories = read_trajectories(file)
    if out.suffix == ".svg":
        targets = {out: select_trajectory(file, trajectories, index, trajectory_id)}
    else:
        targets = _picture_files(out, trajectories)

    for path, trajectory in targets.items():
        task = tasks.get(trajectory.task_id)
        if task is None or task.env not in GAMES:
            # A run may play a task in another environment than the task names. The board is that of
            # the task's own environment, so a task of no game has no picture.
            problem = "is not among the run's tasks" if task is None else "is no puzzle of a game"
            raise RecordError(
                f"{file}: task {trajectory.task_id} {problem}; pictures are of {', '.join(GAMES)}"
            )
        write_text(path, draw_boards(task, game_actions(trajectory)))
    return list(targets)


def _picture_files(folder: Path, trajectories: Sequence[Trajectory]) -> dict[Path, Trajectory]:
    """Choose a file in a folder for the picture of each trajectory; return trajectories by file.

    Trajectories have the same `picture_name` if their ids are equal, or differ only in characters
    that the name replaces. All but the first of them get a number, such as `-2`.
    """
    files: dict[Path, Trajectory] = {}
    for trajectory in trajectories:
        path = folder / picture_name(trajectory)
        stem = path.stem
        number = 1
        while path in files:
            number += 1
            path = folder / f"{stem}-{number}.svg"
        files[path] = trajectory
    return files


def draw_trajectory(task: Task, trajectory: Trajectory) -> str | None:
    """Return the picture of a trajectory as SVG; None if its task is no puzzle of a game."""
    if task.env not in GAMES:
        return None
    try:
        return draw_boards(task, game_actions(trajectory))
    except BadPuzzle:
        return None


def picture_name(trajectory: Trajectory) -> str:
    """Return the file name of a trajectory's picture: its id, with "_" for characters such as "/"."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', trajectory.id)}.svg"


def game_actions(trajectory: Trajectory) -> list[str]:
    """Return the actions of each step of a game as a text, such as "R, R, D"; "" if there were none.

    A step of the game follows each round of turns; the last round of a failed trajectory may have
    none. The last turn of the round gives the actions, in its reply, or in the output of its program.
    A malformed reply and a failed program give none.
    """
    # A later turn of a round replaces an earlier one. Turns get the score "team" by the step.
    last_turns = {turn.round: turn for turn in trajectory.path if "team" in turn.scores}
    program_calls = {(event.node, event.after_turn): event for event in trajectory.tools}
    return [
        _actions_of_turn(turn, program_calls.get((turn.node, turn.index)))
        for _, turn in sorted(last_turns.items())
    ]


def _actions_of_turn(turn: Turn, program_call: ToolEvent | None) -> str:
    """Return the list of actions that a turn decided on, as a text; "" without one.

    Args:
        turn: turn before a step of a game.
        program_call: run of the turn's program; None if the turn has no program.
    """
    if not turn.valid:
        return ""
    if program_call is None:
        return parse_decided(turn.text) or ""
    if program_call.failed:
        return ""
    return parse_listed(program_call.result) or ""


def draw_boards(task: Task, actions: Sequence[str]) -> str:
    """Return an SVG with a row of boards: the puzzle of a task, and the board after each step.

    Args:
        task: puzzle of a game.
        actions: actions of each step, as `game_actions` returns them. A text that is no list of
            actions repeats the board before it.

    Raises:
        BadPuzzle: the task's prompt is not a puzzle of its game.
    """
    game = GAMES[task.env]()
    states = [game.read(task.prompt)]
    for text in actions:
        played = game.play(states[-1], text)
        states.append(states[-1] if played is None else played.state)

    boards = [game.board(state) for state in states]
    widths = [_SQUARE_SIZE * max(map(len, board)) + _BOARD_GAP for board in boards]
    lefts = list(accumulate(widths, initial=_BOARD_GAP))
    return render_page(
        "boards.svg.jinja",
        boards=list(zip(boards, lefts, strict=False)),
        width=lefts[-1],  # the left edge that a further board would have
        height=_SQUARE_SIZE * max(map(len, boards)) + 2 * _BOARD_GAP,
        square=_SQUARE_SIZE,
        gap=_BOARD_GAP,
    )
