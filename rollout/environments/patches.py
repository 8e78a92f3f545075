"""Code patches as models write them: unified diffs, or SEARCH/REPLACE blocks.

`parse_patch` reads the edits of a text, and `apply_patch` makes them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from rollout.environments.protocol import after_thought

_HUNK_HEADER = re.compile(r"^@@ -(\d{1,9})(?:,\d+)? \+\d+(?:,\d+)? @@")
# Lines that name a file, down to the header of its first hunk.
_FILE_HEADER = re.compile(r"(?:--- .*\n)?\+\+\+ .*\n@@ -")
_BLOCK = re.compile(
    r"^(?P<path>[^\s`<>*#][^\n`<>]*?)[ \t]*\n(?:```[^\n]*\n)?<{5,9} SEARCH[ \t]*\n"
    r"(?P<old>.*?)^={5,9}[ \t]*\n(?P<new>.*?)^>{5,9} REPLACE[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_BLOCK_START = re.compile(r"^<{5,9} SEARCH[ \t]*$", re.MULTILINE)
_MAX_PATH_CHARS = 200


class BadPatch(ValueError):
    """A text is not a patch, or does not fit the files. The message is for the patch's author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Replacement of some lines of a file.

    Attributes:
        path: path within the repository.
        old: lines to replace, without line ends; () to insert `new`.
        new: lines to put in their place.
        line: number of a line in the file before all edits, counted from 1; None if the patch states
            none, as SEARCH/REPLACE blocks do. If there are old lines, it is the number of the first
            of them; if they do not start there, or the number is None, they must occur in the file
            exactly once. If there are no old lines, `new` is inserted after this line, and 0 means
            the beginning; if the number is None, the file must be new or empty.
    """

    path: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    line: int | None = None


def parse_patch(text: str) -> list[Edit]:
    """Return the edits of the SEARCH/REPLACE blocks of a reply, or else of its unified diff.

    The text up to the last `</think>` is ignored.

    Raises:
        BadPatch: the text has no edit, a path is refused (see `_repository_path`), one of several blocks
            has no path or no end, or a hunk has no file or no line numbers.
    """
    text = after_thought(text)
    edits = []
    for block in _BLOCK.finditer(text):
        edit = Edit(
            path=_repository_path(block["path"]),
            old=tuple(_lines(block["old"])),
            new=tuple(_lines(block["new"])),
        )
        edits.append(edit)
    if edits and _BLOCK_START.search(_BLOCK.sub("", text)):
        raise BadPatch(
            "A SEARCH/REPLACE block cannot be read: write the path of its file alone in the line above "
            "`<<<<<<< SEARCH`, and end it with `>>>>>>> REPLACE`."
        )
    if not edits:
        edits = _parse_diff(text)
    if not edits:
        raise BadPatch(
            "There is no patch: expected a unified diff, or SEARCH/REPLACE blocks under a path."
        )
    return edits


def apply_patch(files: Mapping[str, str], edits: Sequence[Edit]) -> dict[str, str]:
    """Return the files after all edits, which are made one after the other.

    A changed file ends all its lines with CRLF if it had a CRLF before, and else with LF. A file whose
    lines are all removed stays as an empty file.

    Raises:
        BadPatch: an edit's file does not exist or lacks the lines to replace, or the edit does not
            say which of several places it means.
    """
    patched = dict(files)
    # The earlier edits of each file that have a line number, as pairs: the index of the edit in the
    # original file, and the number of lines that it has added, negative if it has removed some.
    additions: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for edit in edits:
        if edit.path not in patched and edit.old:
            raise BadPatch(f"There is no file {edit.path}.")
        text = patched.get(edit.path, "")
        lines = _lines(text)
        original_index = _original_index(edit)
        expected_start = None
        if original_index is not None:
            added_above = sum(
                added for index, added in additions[edit.path] if index <= original_index
            )
            expected_start = original_index + added_above
            additions[edit.path].append((original_index, len(edit.new) - len(edit.old)))

        start = _find_lines(edit, lines, expected_start)
        lines[start : start + len(edit.old)] = edit.new
        line_end = "\r\n" if "\r\n" in text else "\n"
        patched[edit.path] = "".join(line + line_end for line in lines)
    return patched


def _lines(text: str) -> list[str]:
    """Split a text into lines at LF or CRLF; the line ends are left out.

    str.splitlines also ends lines at form feeds and other characters, which source files contain.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()  # the text ends with a line end, or is empty
    return lines


def _original_index(edit: Edit) -> int | None:
    """Return the index of the original line that an edit replaces first, or inserts before.

    None if the edit has no line number.
    """
    if edit.line is None:
        return None
    if not edit.old:
        # Lines that are inserted after line n stand before the line of index n.
        return edit.line
    return max(edit.line, 1) - 1


def _find_lines(edit: Edit, lines: Sequence[str], expected_start: int | None) -> int:
    """Return the index of the first line that an edit replaces, or at which it inserts.

    If the old lines are not at the expected index, they must occur exactly once.

    Args:
        edit: the edit.
        lines: lines of the file, after the earlier edits.
        expected_start: index that follows from the edit's line number; None without a number.

    Raises:
        BadPatch: there is no such place, or more than one.
    """
    if not edit.old:
        if expected_start is not None:
            return min(max(expected_start, 0), len(lines))
        if lines:
            raise BadPatch(f"{edit.path} is not empty; say which lines are to be replaced.")
        return 0

    count = len(edit.old)
    starts = [
        start
        for start in range(len(lines) - count + 1)
        if tuple(lines[start : start + count]) == edit.old
    ]
    if expected_start in starts:
        return expected_start
    if len(starts) != 1:
        problem = f"stand there {len(starts)} times" if starts else "are not there"
        raise BadPatch(f"{edit.path}: the lines to replace, from {edit.old[0]!r} on, {problem}.")
    return starts[0]


def _parse_diff(text: str) -> list[Edit]:
    """Return one edit for each hunk of a unified diff.

    Models count the rows of a hunk badly, so the lengths in its header are ignored. A hunk ends at
    the next header, or at the first row that begins with none of space, `+`, `-` and backslash. An
    empty row is an empty line of context.

    Raises:
        BadPatch: a path is refused, or a hunk has no file or no line numbers.
    """
    edits: list[Edit] = []
    path = ""
    line: int | None = None  # number in the header of the current hunk; None outside of hunks
    hunk: list[str] = []
    rows = _lines(text)
    for index, row in enumerate(rows):
        in_hunk = line is not None
        names_file = _names_file(rows, index, in_hunk)
        continues_hunk = not row or row[0] in "+- \\"
        if in_hunk and continues_hunk and not names_file:
            if not row.startswith("\\"):  # "\ No newline at end of file" is no line
                hunk.append(row or " ")
            continue

        edits += _edit_of_hunk(hunk, path, line)
        hunk = []
        line = None
        header = _HUNK_HEADER.match(row)
        if header:
            if not path:
                raise BadPatch("A hunk of the diff comes before the line +++ that names its file.")
            line = int(header.group(1))
        elif row.startswith("@@") and path:
            raise BadPatch(
                f"The hunk header {row!r} has no line numbers; write it as '@@ -12,3 +12,4 @@'."
            )
        elif names_file:
            name = row[4:].split("\t")[0].strip()
            # `--- /dev/null` creates a file and `+++ /dev/null` removes one; the other row names it.
            if name != "/dev/null":
                path = _repository_path(re.sub(r"^[ab]/", "", name.strip('"')))
    edits += _edit_of_hunk(hunk, path, line)
    return edits


def _names_file(rows: Sequence[str], index: int, in_hunk: bool) -> bool:
    """Return True if a row of a diff is a line `--- path` or `+++ path`.

    In a hunk the row may also be the removed line `-- ...` or the added line `++ ...`. There it names
    a file only if the header of the file's first hunk follows.
    """
    if not rows[index].startswith(("--- ", "+++ ")):
        return False
    return not in_hunk or _FILE_HEADER.match("\n".join(rows[index : index + 3])) is not None


def _edit_of_hunk(hunk: Sequence[str], path: str, line: int | None) -> list[Edit]:
    """Return the edit of a hunk's rows; [] if there are none."""
    rows = list(hunk)
    # Blank rows at the end are the space between the diff and the text after it.
    while rows and rows[-1] == " ":
        rows.pop()
    if not rows:
        return []
    old = tuple(row[1:] for row in rows if row[0] != "+")
    new = tuple(row[1:] for row in rows if row[0] != "-")
    return [Edit(path=path, old=old, new=new, line=line)]


def _repository_path(text: str) -> str:
    """Return the path within the repository that an edit names.

    Raises:
        BadPatch: the path is empty, absolute, too long or not printable, or leads out of the
            repository.
    """
    name = text.strip().strip('"')
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or ".." in path.parts
    if not name or leads_out or not name.isprintable() or len(name) > _MAX_PATH_CHARS:
        raise BadPatch(f"{text.strip()} is no path within the repository.")
    return str(path)
