"""Fenced blocks of Markdown in a reply, and the program among them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt

_THOUGHT_END = "</think>"
_PYTHON_LABELS = ("python", "py", "python3", "py3")
# Finds the label "python" in `python`, `{.python}` and `python title="main.py"`.
_LABEL = re.compile(r"[\s{.]*([\w+-]*)")
_INVISIBLE = "\ufeff\u200b\u200c\u2060"
# Tags and invisible characters hide a fence from a Markdown parser.
_BEFORE_FENCE = re.compile(
    rf"^(?P<tags>[ \t>]*(?:<[^<>\n]+>[ \t]*)*)[{_INVISIBLE}]*(?=```|~~~)", re.MULTILINE
)
_BEHIND_FENCE = re.compile(r"^(?P<fence>[ \t>]*(?:`{3,}|~{3,}))[ \t]*(?=</)", re.MULTILINE)
# A block of HTML would include the fences that follow its tag.
_MARKDOWN = MarkdownIt("commonmark").disable("html_block")
# Fences are blocks, so the text inside of paragraphs is not parsed.
_MARKDOWN.core.ruler.enableOnly(["normalize", "block"])


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedBlock:
    """A closed fenced block.

    Attributes:
        label: first word after the opening fence in lower case, such as "python"; "" without one.
        content: text between the fences, without the indentation of a list or a quotation.
        first_line: index of the line of the opening fence, from 0.
        end_line: index of the line that follows the closing fence.
    """

    label: str
    content: str
    first_line: int
    end_line: int


def fenced_blocks(text: str) -> Iterator[FencedBlock]:
    """Yield the closed fenced blocks of a Markdown text, also those in lists and quotations.

    The lines of a block are counted in the text that `_separate_fences` returns.
    """
    text = _separate_fences(text)
    lines = _lines(text)
    for token in _MARKDOWN.parse(text):
        if token.type != "fence" or token.map is None:
            continue
        first_line, end_line = token.map
        last_line = lines[end_line - 1].strip(" \t>")
        # A closing fence is as long as the opening one, or longer. The parser also ends a block
        # without one, at the end of the text, the list or the quotation. A block of one line has
        # only its opening fence.
        is_fence = last_line.startswith(token.markup) and not last_line.strip(token.markup[0])
        if is_fence and end_line - first_line > 1:
            match = _LABEL.match(token.info)
            label = match[1].lower() if match else ""
            yield FencedBlock(
                label=label, content=token.content, first_line=first_line, end_line=end_line
            )


def last_program(text: str) -> str | None:
    """Return the last fenced program of a reply; None if there is none, or if it is blank.

    The text up to the last `</think>` is ignored. A program is a closed block that is labelled as
    Python. Blocks without a label are programs if no block is labelled as Python; otherwise they are
    outputs and samples.
    """
    blocks = list(fenced_blocks(text.rpartition(_THOUGHT_END)[2]))
    programs = [block.content for block in blocks if block.label in _PYTHON_LABELS]
    if not programs:
        programs = [block.content for block in blocks if not block.label]
    if not programs or not programs[-1].strip():
        return None
    return programs[-1]


def without_programs(text: str) -> str:
    """Return a text with blank lines in place of its blocks that are or may be programs.

    These are the closed blocks that are labelled as Python or have no label.
    """
    lines = _lines(_separate_fences(text))
    for block in fenced_blocks(text):
        if not block.label or block.label in _PYTHON_LABELS:
            for index in range(block.first_line, block.end_line):
                lines[index] = ""
    return "\n".join(lines)


def _separate_fences(text: str) -> str:
    """Return a text whose fences stand on lines without tags and invisible characters."""
    text = _BEFORE_FENCE.sub(_break_line_after_tags, text)
    return _BEHIND_FENCE.sub("\\g<fence>\n", text)


def _break_line_after_tags(match: re.Match[str]) -> str:
    tags = match["tags"]
    return f"{tags}\n" if "<" in tags else tags


def _lines(text: str) -> list[str]:
    """Return the lines of a text as the Markdown parser counts them."""
    return re.split(r"\r\n|\r|\n", text)
