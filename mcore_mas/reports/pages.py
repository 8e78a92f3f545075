"""Web pages and SVG pictures of trajectories. The pages load and run nothing; model output is escaped text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from rollout.base.files import write_text
from rollout.base.text import escape_text
from rollout.environments.games import GAMES
from rollout.environments.games.game import BadPuzzle
from rollout.orchestras.replies import parse_decided, parse_listed
from rollout.records.files import RecordError, read_tasks, read_trajectories
from rollout.records.grouping import group_pairs
from rollout.records.trajectory import Task, Trajectory

if TYPE_CHECKING:  # it brings torch, and lists of runs and pages need none
    from mcore_mas.credit.samples import Sample

TurnAdvantages = Mapping[tuple[str, str, int], float]  # (trajectory, node, turn) -> its advantage
# (node, turn) -> text, log-probability of each token
TurnPieces = Mapping[tuple[str, int], Sequence[tuple[str, float]]]
_NO_PIECES: TurnPieces = {}


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """Turns of a task that an estimator compared with one another, and where it stands in the credit of each."""

    label: str  # what the comparison gives: "mean", "std" or both, "peers"
    alike: tuple[str, ...]  # columns that these turns have in common
    one_vote: tuple[str, ...]  # columns that turns of one vote have in common
    size: int  # votes, those of other tasks included
    mean: float
    std: float
    members: list[
        tuple[Sample, float, float | None]
    ]  # of the task: the turn, its vote, its advantage


TurnGroups = Mapping[
    tuple[str, str, int], Sequence[PeerGroup]
]  # (trajectory, node, turn) -> where it was compared
_NO_GROUPS: TurnGroups = {}
_HUES = 7  # agents that have a colour of their own


def render_page(template: str, **values: Any) -> str:
    """The page that `template`, a file of `templates/`, makes of `values`.

    On a web page every value is escaped; control and bidirectional characters, which a browser would obey, are written
    out. Should an escape ever be missing, the page's own content security policy lets nothing run and nothing load.
    """
    return _TEMPLATES.get_template(template).render(values)


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    # pages of these kinds quote this repository
    autoescape=select_autoescape(disabled_extensions=("md.jinja", "json.jinja"), default=True),
    # a macro's output has been through here
    finalize=lambda value: (
        escape_text(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
    ),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def trajectory_page(
    trajectory: Trajectory,
    advantages: TurnAdvantages,
    pieces: TurnPieces = _NO_PIECES,
    groups: TurnGroups = _NO_GROUPS,
) -> str:
    """The page of one trajectory; of a tree, with the branches that did not go on folded where they left the path.

    Turns that have `pieces` show their tokens, shaded by how unlikely each was or, if asked, by the turn's advantage;
    those with `groups`, which turns they were compared with.
    """
    agents = group_pairs((turn.agent, turn) for turn in trajectory.turns)
    nodes = group_pairs((turn.node, turn) for turn in trajectory.turns)
    tools = group_pairs(((event.node, event.after_turn), event) for event in trajectory.tools)
    path = {
        node: [
            other
            for other in nodes
            if node and other and other != node and _parent(other) == _parent(node)
        ]
        for node in dict.fromkeys(turn.node for turn in trajectory.path)
    }
    own = {
        (node, index): value
        for (of, node, index), value in advantages.items()
        if of == trajectory.id
    }
    return render_page(
        "trajectory.html.jinja",
        trajectory=trajectory,
        agents=agents,
        hues={agent: f"var(--a{i % _HUES})" for i, agent in enumerate(agents)},
        nodes=nodes,
        path=path,
        tools=tools,
        advantages=own,
        pieces=pieces,
        groups=groups,
        largest=max(map(abs, own.values()), default=0.0),
    )


def framed(page: str) -> Markup:
    """A page inside another one, where it can run and load nothing."""
    return Markup(
        '<iframe sandbox srcdoc="{}" style="width: 100%; height: 32em; border: 0"></iframe>'
    ).format(page)


def _parent(node: str) -> str:
    return node.rpartition(".")[0]


def find_trajectory(
    file: Path, trajectories: Sequence[Trajectory], index: int, trajectory_id: str | None
) -> Trajectory:
    """The one of `trajectories`, read from `file`, that has `trajectory_id`, or without an id the `index`-th.

    Raises:
        RecordError: there is no such trajectory.
    """
    if trajectory_id is not None:
        index = next(
            (i for i, trajectory in enumerate(trajectories) if trajectory.id == trajectory_id), -1
        )
        if index < 0:
            raise RecordError(
                f"{file}: no trajectory '{trajectory_id}'; the first is '{trajectories[0].id}'"
            )
    if not 0 <= index < len(trajectories):
        raise RecordError(
            f"{file}: no trajectory {index}; it holds {len(trajectories)}, counted from 0"
        )
    return trajectories[index]


def draw_games(
    file: Path, out: Path, *, index: int = 0, trajectory_id: str | None = None
) -> list[Path]:
    """Write pictures of the trajectories of `file`, and say which.

    Args:
        out: a file named .svg for the `index`-th trajectory or the one with `trajectory_id`; else a folder for all.

    Raises:
        RecordError: the file is no file of trajectories, lies in no run with tasks, or is not of games.
    """
    if out.suffix not in ("", ".svg"):
        raise RecordError(f"{out}: pictures are SVG; name a file that ends in .svg, or a folder")
    tasks = {task.id: task for task in _tasks(file)}
    trajectories = read_trajectories(file)
    if out.suffix:
        targets = {out: find_trajectory(file, trajectories, index, trajectory_id)}
    else:
        targets = {out / file_name(t): t for t in trajectories}
    for path, trajectory in targets.items():
        task = tasks.get(trajectory.task_id)
        if task is None or task.env not in GAMES:
            what = (
                "is not among the run's tasks" if task is None else f"is played in env '{task.env}'"
            )
            raise RecordError(
                f"{file}: task {trajectory.task_id} {what}; pictures are of {', '.join(GAMES)}"
            )
        write_text(path, picture(task, actions_of(trajectory)))
    return list(targets)


def drawing(task: Task, trajectory: Trajectory) -> str | None:
    """The picture of a trajectory of `task`; None of what is no game."""
    with suppress(BadPuzzle):  # nobody could play it either
        return picture(task, actions_of(trajectory)) if task.env in GAMES else None
    return None


def file_name(trajectory: Trajectory) -> str:
    """Of its picture."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', trajectory.id)}.svg"


def actions_of(trajectory: Trajectory) -> list[str]:
    """What was done in each step of a game, "" where nothing was.

    That is what the last turn before the step decided, or what the program that it wrote printed.
    """
    last = {turn.round: turn for turn in trajectory.path}
    printed = {
        (event.node, event.after_turn): "" if event.failed else parse_listed(event.result)
        for event in trajectory.tools
    }
    done = []
    for _, turn in sorted(last.items()):
        decided = printed.get((turn.node, turn.index), parse_decided(turn.text))
        done.append((decided or "") if turn.valid else "")
    return done


def _tasks(file: Path) -> Sequence[Task]:
    """The tasks of the run that a file of trajectories lies in."""
    folder = next(
        (parent / "tasks" for parent in file.resolve().parents if (parent / "tasks").is_dir()), None
    )
    if folder is None:
        raise RecordError(f"{file}: in no run's folder, where the tasks to draw are under tasks/")
    return [task for path in sorted(folder.glob("*.parquet")) for task in read_tasks(path)]


_CELL, _GAP = 24, 16  # pixels


def picture(task: Task, actions: Sequence[str]) -> str:
    """The boards of `task` from left to right, each after one more of the lists of `actions`, as SVG.

    A text that is no list of actions repeats the board.

    Raises:
        BadPuzzle: the task's prompt is no puzzle of its game.
    """
    game = GAMES[task.env]()
    states = [game.read(task.prompt)]
    for text in actions:
        played = game.play(states[-1], text)
        states.append(states[-1] if played is None else played.state)
    boards = [game.board(state) for state in states]
    lefts = accumulate((_CELL * max(map(len, board)) + _GAP for board in boards), initial=_GAP)
    return render_page(
        "boards.svg.jinja",
        boards=list(zip(boards, lefts, strict=False)),
        heights=list(map(len, boards)),
        cell=_CELL,
        gap=_GAP,
    )
