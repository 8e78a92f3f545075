"""Agents' replies: parsers, which roles.yaml names without `parse_`, and how answers are graded, computed, voted on."""

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

LISTED = "**Actions List**:"  # what a game's proposal starts with, in a reply as in the output of a program
DECIDED = "####"  # what a game's final actions start with
END = "<end>"  # what ends a search
NONE = "none"  # of the passages
MAX_STEPS = 5  # of a plan as the planner writes it
MAX_PARTS = 3  # queries that a question is split into
_NUMBERS = re.compile(r"[1-9][0-9]*( *, *[1-9][0-9]*)*")
_CASE = re.compile(r"<input>(.*?)</input>\s*<output>(.*?)</output>", re.DOTALL)

Steps = tuple[tuple[str, str], ...]  # sub-questions of a plan, each with what is believed of it


def fenced(program: str | None) -> str:
    """A program as an environment takes it; "" without one."""
    return f"```python\n{program.rstrip()}\n```" if program else ""


def parse_spoken(text: str) -> str | None:
    """The text after any thought, None when there is none."""
    return after_thought(text) or None


def parse_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` after any thought, None when there is none or it is empty."""
    return last_boxed(text) or None


def parse_solution(text: str) -> str | None:
    """The text after any thought, which is what the environment `math` takes; None when its last box is missing."""
    text = after_thought(text)
    return text if last_boxed(text) else None


def parse_fenced_program(text: str) -> str | None:
    """The last program in its fence, which is what the environment `code` takes; None without one."""
    return fenced(last_program(text)) or None


def parse_boxed_verdict(text: str) -> str | None:
    """ "1" or "0" from the last box, None when it holds anything else."""
    verdict = parse_boxed(text)
    return verdict if verdict in ("0", "1") else None


def parse_enough(text: str) -> str | None:
    """ "yes" or "no" from the last `<verify>` tag, None when it holds anything else."""
    verdict = (last_tag(text, "verify") or "").lower()
    return verdict if verdict in ("yes", "no") else None


def parse_approval(text: str) -> str | None:
    """`approve` or `reject`, None unless the text has exactly one such verdict in one pair of tags."""
    verdict = last_tag(text, "verify")
    once = text.count("<verify>") == text.count("</verify>") == 1
    return verdict if once and verdict in ("approve", "reject") else None


def parse_review(text: str) -> str | None:
    """The status and the feedback as two lines, None unless both tags are there and the status is known."""
    text = after_thought(text)
    status, feedback = last_tag(text, "status"), last_tag(text, "feedback")
    return f"{status}\n{feedback}" if status in ("correct", "incorrect") and feedback else None


def parse_cases(text: str) -> str | None:
    """Tests as a JSON list of [input, output]; None when there is none or a tag stands outside a test."""
    text = after_thought(text)
    cases = [(given.strip(), expected.strip()) for given, expected in _CASE.findall(text)]
    tags = [text.count(tag) for tag in ("<input>", "</input>", "<output>", "</output>")]
    return json.dumps(cases) if cases and tags == [len(cases)] * 4 else None


def parse_repair(text: str) -> str | None:
    """The text after any thought, None when there is no patch in it."""
    try:
        parse_patch(text)
    except BadPatch:
        return None
    return after_thought(text)


def _tag(name: str, *, spoken: bool = False) -> Callable[[str], str | None]:
    """The parser of a tag; a `spoken` one stands after any thought."""

    def parse(text: str) -> str | None:
        return last_tag(after_thought(text) if spoken else text, name) or None

    where = " after any thought" if spoken else ""
    parse.__doc__ = (
        f"The content of the last `<{name}>` tag{where}, None when it is missing or empty."
    )
    return parse


def parse_query(text: str) -> str | None:
    """The query in the last `<search>` tag; None when it is missing, empty or holds another tag."""
    query = last_tag(text, "search")
    return query if query and not set("<>") & set(query) else None


def parse_search(text: str) -> str | None:
    """The query in the last `<search>` tag, or "<end>"; None for both, neither, or a query that holds a tag."""
    if END not in text:
        return parse_query(text)
    return END if last_tag(text, "search") is None else None


def parse_queries(text: str) -> str | None:
    """The lines of the last `<queries>` tag; None unless they are one to three different ones without tags."""
    block = last_tag(text, "queries") or ""
    queries = [line.strip() for line in block.splitlines() if line.strip()]
    different = len(set(queries)) == len(queries) and 1 <= len(queries) <= MAX_PARTS
    return "\n".join(queries) if different and not set("<>") & set(block) else None


def parse_selection(text: str) -> str | None:
    """Different positive numbers with commas between, or "none", from the last `<select>` tag; None for others."""
    chosen = (last_tag(text, "select") or "").lower()
    if chosen == NONE:
        return NONE
    numbers = [number.strip() for number in chosen.split(",")]
    return (
        ",".join(numbers)
        if _NUMBERS.fullmatch(chosen) and len(set(numbers)) == len(numbers)
        else None
    )


def read_plan(text: str) -> tuple[Steps, str] | None:
    """The last `<plan>`, of one to five lines `sub-question | answer`, and the last `<answer>`; None if malformed."""
    lines = [line for line in (last_tag(text, "plan") or "").splitlines() if line.strip()]
    steps = [sides for line in lines if (sides := _sides(line))]
    answer = last_tag(text, "answer")
    well_formed = answer and len(steps) == len(lines) and 1 <= len(steps) <= MAX_STEPS
    return (tuple(steps), answer) if answer and well_formed else None


def parse_plan(text: str) -> str | None:
    """The text itself, for `read_plan`; None unless it holds a plan and an answer."""
    return text if read_plan(text) else None


def parse_change(text: str) -> str | None:
    """`update|t1|answer` or `add|sub-question|answer`; None unless the text makes exactly one such change."""
    found = {
        kind: content for kind in ("update", "add") if (content := last_tag(text, kind)) is not None
    }
    if len(found) != 1:
        return None
    ((kind, content),) = found.items()
    sides = _sides(content)
    if (
        sides is None
        or "\n" in content
        or (kind == "update" and not re.fullmatch("t[1-9][0-9]{0,2}", sides[0]))
    ):
        return None
    return f"{kind}|{sides[0]}|{sides[1]}"


def _sides(line: str) -> tuple[str, str] | None:
    """The two sides of `left | right`, None unless both are there and hold no tag."""
    left, bar, right = (part.strip() for part in line.partition("|"))
    return (left, right) if bar and left and right and not set("|<>") & set(left + right) else None


def parse_listed(text: str) -> str | None:
    """The rest of the last line that starts with `**Actions List**:`, None when there is none or nothing follows."""
    lines = [line.strip() for line in text.splitlines()]
    listed = [line.removeprefix(LISTED).strip() for line in lines if line.startswith(LISTED)]
    return (listed or [""])[-1] or None


def parse_decided(text: str) -> str | None:
    """What follows the last `####`; None when it is missing, nothing follows, or more than one line does."""
    _, sign, actions = text.rpartition(DECIDED)
    actions = actions.strip()
    return actions if sign and actions and "\n" not in actions else None


def parse_search_or_answer(text: str) -> str | None:
    """The last search or answer with its tags, which is what the environment `search` takes; the answer wins."""
    found = ((name, last_tag(text, name)) for name in ("answer", "search"))
    return next((f"<{name}> {content} </{name}>" for name, content in found if content), None)


def parse_call_or_answer(text: str) -> str | None:
    """The last tool call or answer with its tags, which is what the environment `mcp` takes; the answer wins."""
    text = after_thought(text)
    found = ((name, last_tag(text, name)) for name in ("answer", "call"))
    return next((f"<{name}>{content}</{name}>" for name, content in found if content), None)


parse_action = _tag("action", spoken=True)
parse_answer = _tag("answer")
parse_evidence = _tag("evidence")
parse_program = last_program
parse_pseudocode = _tag("pseudocode", spoken=True)
parse_reflection = _tag("reflection", spoken=True)
parse_summary = _tag("summary", spoken=True)


def boxed(answer: str | None) -> str:
    """An answer as the environment takes it; "" without one, which is scored as a wrong answer."""
    return f"\\boxed{{{answer}}}" if answer else ""


async def grade(team: TeamSession, env: PlayedEnv, turn: int, answer: str | None) -> float | None:
    """Write down the local score of a turn's answer, the reward that it would have alone; returns it.

    A malformed reply, one that was cut off included, has no answer and is graded so. What the environment cannot decide
    has no local score but the score `undecided`, 1, and the result is None.
    """
    try:
        step = await env.preview(boxed(answer))
    except Undecided:
        team.score(turn, undecided=1.0)
        return None
    team.score(turn, local=step.reward)  # before anybody else is asked: a tree chooses by it
    return step.reward


async def graded(team: TeamSession, env: PlayedEnv, name: str, **slots: object) -> AgentReply:
    """The reply of an agent who is asked for a boxed answer, after its local score was written down; see `grade`."""
    reply = await team.act(name, **slots)
    await grade(team, env, reply.turn, reply.value)
    return reply


async def calculated(team: TeamSession, env: PlayedEnv, **slots: object) -> tuple[str | None, str]:
    """Ask the agent `tool_user`, run the program of its reply, and write down its local score.

    The score is Stronger-MAS's: 1 for the right answer, 0 for a wrong one, -1 when the program failed or there is none.

    Returns:
        The answer, the last line that the program printed (the content of its box, if it has one), or None; and what
        the tool user's partners may read: its program with what came of it.
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
    content = last_boxed(line)
    answer = (line if content is None else content) or None
    await grade(team, env, reply.turn, answer)
    return answer, shown


def numbered(texts: Iterable[str]) -> str:
    """Solutions as those read them who compare them."""
    return "\n\n".join(f"[Solution {number}]\n{text}" for number, text in enumerate(texts, start=1))


def with_output(program: str, output: str) -> str:
    """A program with what it printed, as it is read later."""
    return f"```python\n{program}\n```\n{output}"


async def vote(env: PlayedEnv, answers: Sequence[str | None]) -> str | None:
    """The most frequent answer, in the words in which it was given first; of equally frequent ones the first.

    None does not vote, and is the result when nobody does.
    """
    kinds: list[list[str]] = []
    for answer in answers:
        if answer is None:
            continue
        for kind in kinds:
            if await env.same(answer, kind[0]):
                kind.append(answer)
                break
        else:
            kinds.append([answer])
    return max(kinds, key=len)[0] if kinds else None  # max keeps the first of equals
