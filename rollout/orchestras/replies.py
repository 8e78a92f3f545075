"""Replies of agents: parsers, and the grading of and voting on answers.

roles.yaml names the parsers without their prefix `parse_`. A parser returns the value of a reply,
or None if the reply is malformed.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence

from rollout.base.errors import Undecided
from rollout.environments.fenced_programs import last_program
from rollout.environments.math_notation import last_boxed
from rollout.environments.patches import BadPatch, parse_patch
from rollout.environments.protocol import PlayedEnv, after_thought, last_tag
from rollout.sandbox.records import NO_OUTPUT
from rollout.teams.roles import AgentReply
from rollout.teams.team import TeamSession

LISTED = "**Actions List**:"  # before proposed actions of a game, in a reply or a program's output
DECIDED = "####"  # before the final actions of a game
END = "<end>"  # reply of a searcher that ends the search
NONE = "none"  # reply of a selector that selects no passage
MAX_STEPS = 5  # steps of a plan as the planner writes it
MAX_PARTS = 3  # queries that a question is split into
_NUMBERS = re.compile(r"[1-9][0-9]*( *, *[1-9][0-9]*)*")
_CASE = re.compile(r"<input>(.*?)</input>\s*<output>(.*?)</output>", re.DOTALL)

Steps = tuple[tuple[str, str], ...]  # (sub-question, assumed answer) of each step of a plan


def fenced(program: str | None) -> str:
    """Return a program in a fence, as environments read it; "" without a program."""
    return f"```python\n{program.rstrip()}\n```" if program else ""


def parse_spoken(text: str) -> str | None:
    """Return the text after any thought; None if there is none."""
    return after_thought(text) or None


def parse_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` after any thought; None if missing or empty."""
    return last_boxed(text) or None


def parse_solution(text: str) -> str | None:
    """Return the text after any thought, as the environment `math` reads it; None without a box."""
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
    """Return "approve" or "reject" from the only `<verify>` tag; None for others or several tags."""
    verdict = last_tag(text, "verify")
    once = text.count("<verify>") == text.count("</verify>") == 1
    return verdict if once and verdict in ("approve", "reject") else None


def parse_review(text: str) -> str | None:
    """Return status and feedback as two lines; None if a tag is missing or the status is unknown."""
    text = after_thought(text)
    status = last_tag(text, "status")
    feedback = last_tag(text, "feedback")
    if status not in ("correct", "incorrect") or not feedback:
        return None
    return f"{status}\n{feedback}"


def parse_cases(text: str) -> str | None:
    """Return tests as a JSON list of [input, output].

    None if there is no test, or if a tag is outside of the tests.
    """
    text = after_thought(text)
    cases = [(given.strip(), expected.strip()) for given, expected in _CASE.findall(text)]
    tag_counts = [text.count(tag) for tag in ("<input>", "</input>", "<output>", "</output>")]
    if not cases or tag_counts != [len(cases)] * 4:
        return None
    return json.dumps(cases)


def parse_repair(text: str) -> str | None:
    """Return the text after any thought; None if it has no patch."""
    try:
        parse_patch(text)
    except BadPatch:
        return None
    return after_thought(text)


def _tag_parser(name: str, *, skip_thought: bool = False) -> Callable[[str], str | None]:
    """Make a parser of a tag, which ignores tags in a thought if `skip_thought` is True."""

    def parse(text: str) -> str | None:
        if skip_thought:
            text = after_thought(text)
        return last_tag(text, name) or None

    place = " after any thought" if skip_thought else ""
    parse.__doc__ = (
        f"Return the content of the last `<{name}>` tag{place}; None if it is missing or empty."
    )
    return parse


def parse_query(text: str) -> str | None:
    """Return the query of the last `<search>` tag; None if missing, empty or with another tag."""
    query = last_tag(text, "search")
    return query if query and not set("<>") & set(query) else None


def parse_search(text: str) -> str | None:
    """Return the query of the last `<search>` tag, or "<end>"; None for both or neither."""
    if END not in text:
        return parse_query(text)
    return END if last_tag(text, "search") is None else None


def parse_queries(text: str) -> str | None:
    """Return the lines of the last `<queries>` tag.

    None unless there are one to three different lines without tags.
    """
    block = last_tag(text, "queries") or ""
    queries = [line.strip() for line in block.splitlines() if line.strip()]
    has_tag = "<" in block or ">" in block
    has_repeats = len(set(queries)) < len(queries)
    if has_tag or has_repeats or not 1 <= len(queries) <= MAX_PARTS:
        return None
    return "\n".join(queries)


def parse_selection(text: str) -> str | None:
    """Return the numbers of the last `<select>` tag, separated by commas, or "none".

    None unless they are different positive numbers.
    """
    selection = (last_tag(text, "select") or "").lower()
    if selection == NONE:
        return NONE
    numbers = [number.strip() for number in selection.split(",")]
    has_repeats = len(set(numbers)) < len(numbers)
    if has_repeats or not _NUMBERS.fullmatch(selection):
        return None
    return ",".join(numbers)


def read_plan(text: str) -> tuple[Steps, str] | None:
    """Return the steps of the last `<plan>`, and the last `<answer>`.

    A plan has one to five lines `sub-question | answer`. None if plan or answer is malformed.
    """
    plan = last_tag(text, "plan") or ""
    steps = []
    for line in plan.splitlines():
        if not line.strip():
            continue
        step = _split_at_bar(line)
        if step is None:
            return None
        steps.append(step)

    answer = last_tag(text, "answer")
    if not answer or not 1 <= len(steps) <= MAX_STEPS:
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
    """Return the sides of `left | right`; None if one is empty or has a tag or another bar."""
    left, _, right = (part.strip() for part in line.partition("|"))
    if not left or not right or set("|<>") & set(left + right):
        return None
    return left, right


def parse_listed(text: str) -> str | None:
    """Return the rest of the last line that starts with `**Actions List**:`.

    None if there is no such line, or if nothing follows.
    """
    for line in reversed(text.splitlines()):
        if line.strip().startswith(LISTED):
            return line.strip().removeprefix(LISTED).strip() or None
    return None


def parse_decided(text: str) -> str | None:
    """Return the line after the last `####`; None if it is missing, empty or several lines."""
    _, mark, actions = text.rpartition(DECIDED)
    actions = actions.strip()
    if not mark or not actions or "\n" in actions:
        return None
    return actions


def parse_search_or_answer(text: str) -> str | None:
    """Return the last answer, or else the last search, with its tags.

    The environment `search` reads such texts.
    """
    for name in ("answer", "search"):
        content = last_tag(text, name)
        if content:
            return f"<{name}> {content} </{name}>"
    return None


def parse_call_or_answer(text: str) -> str | None:
    """Return the last answer, or else the last tool call, after any thought, with its tags.

    The environment `mcp` reads such texts.
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


def boxed(answer: str | None) -> str:
    """Return an answer in a box, as the environment `math` reads it; "" without an answer."""
    return f"\\boxed{{{answer}}}" if answer else ""


async def grade(team: TeamSession, env: PlayedEnv, turn: int, answer: str | None) -> float | None:
    """Record and return the local score of a turn: the reward that its answer alone would have.

    A malformed or truncated reply is graded as a reply without an answer. If the environment cannot
    decide, the turn has the score `undecided` = 1 in place of a local score, and None is returned.
    """
    try:
        step = await env.preview(boxed(answer))
    except Undecided:
        team.score(turn, undecided=1.0)
        return None
    # A tree selects its branch by this score, so it is recorded before another agent is asked.
    team.score(turn, local=step.reward)
    return step.reward


async def graded(team: TeamSession, env: PlayedEnv, name: str, **slots: object) -> AgentReply:
    """Ask an agent for a boxed answer and record the local score of the reply; see `grade`."""
    reply = await team.act(name, **slots)
    await grade(team, env, reply.turn, reply.value)
    return reply


async def calculated(team: TeamSession, env: PlayedEnv, **slots: object) -> tuple[str | None, str]:
    """Ask the agent `tool_user`, run the program of its reply, and record its local score.

    The score is that of Stronger-MAS: 1 for the right answer, 0 for a wrong one, -1 if there is no
    program or it failed.

    Returns:
        The answer, and the program with its output for the other agents. The answer is the content
        of the box in the last printed line, or else that line; None without one.
    """
    reply = await team.act("tool_user", **slots)
    if reply.value is None:
        team.score(reply.turn, local=-1.0)
        return None, with_output("", "There was no program.")
    call = await env.run(reply.value)
    shown = with_output(reply.value.strip(), call.result)
    if call.failed:
        team.score(reply.turn, local=-1.0)
        return None, shown
    line = "" if call.result == NO_OUTPUT else call.result.splitlines()[-1].strip()
    box = last_boxed(line)
    answer = (line if box is None else box) or None
    await grade(team, env, reply.turn, answer)
    return answer, shown


def numbered(texts: Iterable[str]) -> str:
    """Return solutions under numbered headings, for an agent that compares them."""
    return "\n\n".join(f"[Solution {number}]\n{text}" for number, text in enumerate(texts, start=1))


def with_output(program: str, output: str) -> str:
    """Return a program in a fence, followed by its output."""
    return f"```python\n{program}\n```\n{output}"


async def vote(env: PlayedEnv, answers: Sequence[str | None]) -> str | None:
    """Return the most frequent answer, as it was first written; the first of equally frequent ones.

    Absent answers (None) have no vote; the result is None if all are absent.
    """
    groups: list[list[str]] = []  # answers that are the same
    for answer in answers:
        if answer is None:
            continue
        for group in groups:
            if await env.same(answer, group[0]):
                group.append(answer)
                break
        else:
            groups.append([answer])
    if not groups:
        return None
    return max(groups, key=len)[0]  # the first of groups of equal size
