"""Code patches as models write them: unified diffs, or blocks that say what to search and what to put in its place."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from rollout.environments.protocol import after_thought

_HUNK = re.compile(r"^@@ -(\d{1,9})(?:,\d+)? \+\d+(?:,\d+)? @@")
_BLOCK = re.compile(
    r"^(?P<path>[^\s`<>*#][^\n`<>]*?)[ \t]*\n(?:```[^\n]*\n)?<{5,9} SEARCH[ \t]*\n"
    r"(?P<old>.*?)^={5,9}[ \t]*\n(?P<new>.*?)^>{5,9} REPLACE[ \t]*$",
    re.DOTALL | re.MULTILINE,
)


class BadPatch(ValueError):
    """A text is no patch, or does not fit the files: says why, in words for its author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Lines of a file that others take the place of."""

    path: str
    old: tuple[str, ...]  # without line ends; () puts `new` into a file that is new or empty
    new: tuple[str, ...]
    line: int = 0  # where `old` begins, from 1, if it does not stand elsewhere alone; 0: wherever it stands, once


def parse_patch(text: str) -> list[Edit]:
    """The edits of a unified diff or of SEARCH/REPLACE blocks after any thought, in order.

    Raises:
        BadPatch: there are none, or one is cut off.
    """
    text = after_thought(text)
    blocks = [
        Edit(
            path=_path(found["path"]),
            old=tuple(found["old"].splitlines()),
            new=tuple(found["new"].splitlines()),
        )
        for found in _BLOCK.finditer(text)
    ]
    edits = blocks or _diff(text)
    if not edits:
        raise BadPatch(
            "There is no patch: expected a unified diff, or SEARCH/REPLACE blocks under a path."
        )
    return edits


def apply_patch(files: Mapping[str, str], edits: Sequence[Edit]) -> dict[str, str]:
    """The files with the edits made, one after the other; all of them or none.

    Raises:
        BadPatch: the text that an edit replaces is not in its file, or is there more than once.
    """
    done = dict(files)
    shift: dict[str, int] = {}  # by how much lines have moved down, by path
    for edit in edits:
        lines = done.get(edit.path, "").splitlines()
        if edit.path not in done and edit.old:
            raise BadPatch(f"There is no file {edit.path}.")
        start = _find(edit, lines, shift.get(edit.path, 0))
        lines[start : start + len(edit.old)] = edit.new
        shift[edit.path] = shift.get(edit.path, 0) + len(edit.new) - len(edit.old)
        done[edit.path] = "\n".join(lines) + "\n" if lines else ""
    return done


def _find(edit: Edit, lines: Sequence[str], shift: int) -> int:
    """Where the edit's old lines begin: at its line if they are there, else where they stand once."""
    if not edit.old:
        if lines and not edit.line:
            raise BadPatch(f"{edit.path} is not empty; say which lines are to be replaced.")
        return min(edit.line + shift, len(lines)) if edit.line else 0
    size = len(edit.old)
    told = edit.line - 1 + shift
    if edit.line and told >= 0 and tuple(lines[told : told + size]) == edit.old:
        return told
    places = [i for i in range(len(lines) - size + 1) if tuple(lines[i : i + size]) == edit.old]
    if len(places) != 1:
        what = f"stand there {len(places)} times" if places else "are not there"
        raise BadPatch(f"{edit.path}: the lines to replace, from {edit.old[0]!r} on, {what}.")
    return places[0]


def _diff(text: str) -> list[Edit]:
    """A hunk is as long as its rows begin with a sign; models count the lines of its header badly."""
    edits: list[Edit] = []
    path, line, hunk = "", 0, list[str]()

    def finish() -> None:
        while hunk and hunk[-1] == " ":  # blank lines between the diff and what was said after it
            hunk.pop()
        if hunk:
            old = tuple(row[1:] for row in hunk if row[0] != "+")
            edits.append(
                Edit(
                    path=path,
                    old=old,
                    new=tuple(row[1:] for row in hunk if row[0] != "-"),
                    line=line,
                )
            )
        hunk.clear()

    for row in text.splitlines():
        header = _HUNK.match(row)
        if (
            header is None
            and line
            and not row.startswith(("--- ", "+++ "))
            and (not row or row[0] in "+- \\")
        ):
            hunk += [row or " "] if row[:1] != "\\" else []  # \\ No newline at end of file
            continue
        finish()
        line = max(int(header.group(1)), 1) if header else 0
        if header and not path:
            raise BadPatch("A hunk of the diff comes before the line +++ that names its file.")
        name = row[4:].split("\t")[0].strip()
        if (
            row.startswith(("--- ", "+++ ")) and name != "/dev/null"
        ):  # of a file that is made, or taken away
            path = _path(name)
    finish()
    return edits


def _path(text: str) -> str:
    """A path within the repository; one that leads out of it is refused."""
    name = re.sub(r"^[ab]/", "", text.strip().strip('"'))
    path = PurePosixPath(name)
    if (
        not name
        or path.is_absolute()
        or ".." in path.parts
        or not name.isprintable()
        or len(name) > 200
    ):
        raise BadPatch(f"{text.strip()} is no path within the repository.")
    return str(path)
