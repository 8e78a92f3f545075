"""Parsers of agents' replies, and the fences in which programs are shown.

roles.yaml names the parsers without their prefix `parse_`. A parser returns the value of a reply,
or None if the reply is malformed.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from rollout.environments.fenced_programs import last_program
from rollout.environments.math_notation import last_boxed
from rollout.environments.patches import BadPatch, parse_patch
from rollout.environments.protocol import after_thought, last_tag

PROPOSED_ACTIONS = "**Actions List**:"  # before proposed actions, in a reply or a program's output
FINAL_ACTIONS = "####"  # before the final actions of a game
END_OF_SEARCH = "<end>"  # reply of a searcher that ends the search
NO_PASSAGE = "none"  # reply of a selector that selects no passage
MAX_PLAN_STEPS = 5  # of a plan as the planner writes it
MAX_QUERIES = 3  # into which a question is split
_NUMBERS = re.compile(r"[1-9][0-9]*( *, *[1-9][0-9]*)*")
_CASE = re.compile(r"<input>(.*?)</input>\s*<output>(.*?)</output>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """A step of a plan."""

    question: str  # part of the question that the plan answers
    answer: str  # as the team believes it so far


Plan = tuple[PlanStep, ...]


def fenced(program: str | None) -> str:
    """Return a program in a fence, as environments read it; "" without a program."""
    return f"```python\n{program.rstrip()}\n```" if program else ""


def with_output(program: str, output: str) -> str:
    """Return a program in a fence, followed by its output, as agents read it."""
    return f"```python\n{program}\n```\n{output}"


def parse_spoken(text: str) -> str | None:
    """Return the text after the last `</think>`, or the whole text without one; None if empty."""
    return after_thought(text) or None


def parse_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}`; None if it is missing or empty.

    The text up to the last `</think>` is ignored.
    """
    return last_boxed(text) or None


def parse_solution(text: str) -> str | None:
    """Return the text, which the environment `math` reads; None if it has no box.

    The text up to the last `</think>` is left out.
    """
    text = after_thought(text)
    return text if last_boxed(text) else None


def parse_fenced_program(text: str) -> str | None:
    """Return the last program in a fence, as the environment `code` reads it; None without one."""
    return fenced(last_program(text)) or None


def parse_boxed_verdict(text: str) -> str | None:
    """Return "1" or "0" from the last box; None for other contents."""
    verdict = parse_boxed(text)
    return verdict if verdict in ("0", "1") else None


def parse_enough(text: str) -> str | None:
    """Return "yes" or "no" from the last `<verify>` tag; None for other contents."""
    verdict = (last_tag(text, "verify") or "").lower()
    return verdict if verdict in ("yes", "no") else None


def parse_approval(text: str) -> str | None:
    """Return "approve" or "reject" from the only `<verify>` tag; None for other or several tags."""
    verdict = last_tag(text, "verify")
    once = text.count("<verify>") == text.count("</verify>") == 1
    return verdict if once and verdict in ("approve", "reject") else None


def parse_review(text: str) -> str | None:
    """Return status and feedback as two lines; None if one is missing or the status is unknown.

    The text up to the last `</think>` is ignored.
    """
    text = after_thought(text)
    status = last_tag(text, "status")
    feedback = last_tag(text, "feedback")
    if status not in ("correct", "incorrect") or not feedback:
        return None
    return f"{status}\n{feedback}"


def parse_cases(text: str) -> str | None:
    """Return tests as a JSON list of [input, output].

    None if there is no test, or if a tag is outside of the tests. The text up to the last
    `</think>` is ignored.
    """
    text = after_thought(text)
    cases = [(given.strip(), expected.strip()) for given, expected in _CASE.findall(text)]
    tag_counts = [text.count(tag) for tag in ("<input>", "</input>", "<output>", "</output>")]
    if not cases or tag_counts != [len(cases)] * 4:
        return None
    return json.dumps(cases)


def parse_repair(text: str) -> str | None:
    """Return the text, which the environment `repository` reads; None if it has no patch.

    The text up to the last `</think>` is left out.
    """
    try:
        parse_patch(text)
    except BadPatch:
        return None
    return after_thought(text)


def _tag_parser(name: str, *, skip_thought: bool = False) -> Callable[[str], str | None]:
    """Make a parser of a tag.

    Args:
        name: name of the tag.
        skip_thought: True to ignore the text up to the last `</think>`.
    """

    def parse(text: str) -> str | None:
        if skip_thought:
            text = after_thought(text)
        return last_tag(text, name) or None

    doc = f"Return the content of the last `<{name}>` tag; None if it is missing or empty."
    if skip_thought:
        doc += "\n\nThe text up to the last `</think>` is ignored."
    parse.__doc__ = doc
    return parse


def parse_query(text: str) -> str | None:
    """Return the query of the last `<search>` tag; None if missing, empty or with another tag."""
    query = last_tag(text, "search")
    return query if query and not set("<>") & set(query) else None


def parse_search(text: str) -> str | None:
    """Return the query of the last `<search>` tag, or "<end>"; None for both or neither."""
    if END_OF_SEARCH not in text:
        return parse_query(text)
    return END_OF_SEARCH if last_tag(text, "search") is None else None


def parse_queries(text: str) -> str | None:
    """Return the lines of the last `<queries>` tag.

    None unless there are one to three different lines without tags.
    """
    block = last_tag(text, "queries") or ""
    queries = [line.strip() for line in block.splitlines() if line.strip()]
    has_tag = "<" in block or ">" in block
    has_repeats = len(set(queries)) < len(queries)
    if has_tag or has_repeats or not 1 <= len(queries) <= MAX_QUERIES:
        return None
    return "\n".join(queries)


def parse_selection(text: str) -> str | None:
    """Return the numbers of the last `<select>` tag, separated by commas, or "none".

    None unless they are different positive numbers.
    """
    selection = (last_tag(text, "select") or "").lower()
    if selection == NO_PASSAGE:
        return NO_PASSAGE
    numbers = [number.strip() for number in selection.split(",")]
    has_repeats = len(set(numbers)) < len(numbers)
    if has_repeats or not _NUMBERS.fullmatch(selection):
        return None
    return ",".join(numbers)


def read_plan(text: str) -> tuple[Plan, str] | None:
    """Return the steps of the last `<plan>`, and the last `<answer>`.

    A plan has one to five lines `sub-question | answer`. None if plan or answer is malformed.
    """
    plan = last_tag(text, "plan") or ""
    steps = []
    for line in plan.splitlines():
        if not line.strip():
            continue
        sides = _split_at_bar(line)
        if sides is None:
            return None
        sub_question, sub_answer = sides
        steps.append(PlanStep(question=sub_question, answer=sub_answer))

    answer = last_tag(text, "answer")
    if not answer or not 1 <= len(steps) <= MAX_PLAN_STEPS:
        return None
    return tuple(steps), answer


def parse_plan(text: str) -> str | None:
    """Return the text itself, for `read_plan`; None unless it has a plan and an answer."""
    return text if read_plan(text) else None


def parse_change(text: str) -> str | None:
    """Return a change of a plan: `update|t1|answer` or `add|sub-question|answer`.

    None unless the text has exactly one of the tags `<update>` and `<add>`, with such a line.
    """
    update = last_tag(text, "update")
    addition = last_tag(text, "add")
    if update is not None and addition is None:
        kind = "update"
        content = update
    elif addition is not None and update is None:
        kind = "add"
        content = addition
    else:
        return None

    sides = _split_at_bar(content)
    if sides is None or "\n" in content:
        return None
    left, right = sides
    if kind == "update" and not re.fullmatch("t[1-9][0-9]{0,2}", left):
        return None
    return f"{kind}|{left}|{right}"


def _split_at_bar(line: str) -> tuple[str, str] | None:
    """Return the sides of `left | right`; None if one is empty or has `<`, `>` or another bar."""
    left, _, right = (part.strip() for part in line.partition("|"))
    if not left or not right or set("|<>") & set(left + right):
        return None
    return left, right


def parse_listed(text: str) -> str | None:
    """Return the rest of the last line that starts with `**Actions List**:`.

    None if there is no such line, or if nothing follows.
    """
    for line in reversed(text.splitlines()):
        if line.strip().startswith(PROPOSED_ACTIONS):
            return line.strip().removeprefix(PROPOSED_ACTIONS).strip() or None
    return None


def parse_decided(text: str) -> str | None:
    """Return the line after the last `####`; None if it is missing, empty or several lines."""
    _, mark, actions = text.rpartition(FINAL_ACTIONS)
    actions = actions.strip()
    if not mark or not actions or "\n" in actions:
        return None
    return actions


def parse_search_or_answer(text: str) -> str | None:
    """Return the last answer, or else the last search, with its tags; None if there is neither.

    The environment `search` reads such texts.
    """
    for name in ("answer", "search"):
        content = last_tag(text, name)
        if content:
            return f"<{name}> {content} </{name}>"
    return None


def parse_call_or_answer(text: str) -> str | None:
    """Return the last answer, or else the last tool call, with its tags; None if there is neither.

    The text up to the last `</think>` is ignored. The environment `mcp` reads such texts.
    """
    text = after_thought(text)
    for name in ("answer", "call"):
        content = last_tag(text, name)
        if content:
            return f"<{name}>{content}</{name}>"
    return None


parse_action = _tag_parser("action", skip_thought=True)
parse_answer = _tag_parser("answer")
parse_evidence = _tag_parser("evidence")
parse_program = last_program
parse_pseudocode = _tag_parser("pseudocode", skip_thought=True)
parse_reflection = _tag_parser("reflection", skip_thought=True)
parse_summary = _tag_parser("summary", skip_thought=True)
