"""Answers of agents: asking for them, grading them, and voting on them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout.base.errors import Undecided
from rollout.environments.math_notation import last_boxed
from rollout.environments.protocol import PlayedEnv
from rollout.orchestras.replies import with_output
from rollout.sandbox.records import NO_OUTPUT
from rollout.teams.roles import AgentReply
from rollout.teams.team import TeamSession


def boxed(answer: str | None) -> str:
    """Return an answer in a box, as the environment `math` reads it; "" without an answer."""
    return f"\\boxed{{{answer}}}" if answer else ""


def numbered(texts: Iterable[str]) -> str:
    """Return solutions under numbered headings, for an agent that compares them."""
    return "\n\n".join(f"[Solution {number}]\n{text}" for number, text in enumerate(texts, start=1))


async def grade(team: TeamSession, env: PlayedEnv, turn: int, answer: str | None) -> float | None:
    """Record and return the local score of a turn: the reward that its answer alone would have.

    A malformed or truncated reply is graded as a reply without an answer. If the environment cannot
    decide, the turn has the score `undecided` = 1 in place of a local score, and None is returned.
    """
    return await grade_action(team, env, turn, boxed(answer))


async def grade_action(team: TeamSession, env: PlayedEnv, turn: int, action: str) -> float | None:
    """Record and return the local score of a turn: the reward that the environment would give for an action."""
    try:
        step = await env.preview(action)
    except Undecided:
        team.score(turn, undecided=1.0)
        return None
    # A tree selects its branch by this score, so it is recorded before another agent is asked.
    team.score(turn, local=step.reward)
    return step.reward


def score_verdict(
    team: TeamSession, turn: int, answer_score: float | None, *, says_right: bool | None
) -> None:
    """Record the local score of a verdict on an answer: 1 if it is right, else 0.

    Args:
        turn: turn of the verdict.
        answer_score: local score of the answer; None if it could not be decided, and then the
            verdict has the score `undecided` too.
        says_right: True if the verdict is that the answer is right; None for a malformed verdict.
    """
    if answer_score is None:
        team.score(turn, undecided=1.0)
    else:
        team.score(turn, local=float(says_right == (answer_score > 0)))


async def ask_for_answer(
    team: TeamSession, env: PlayedEnv, name: str, **slots: object
) -> AgentReply:
    """Ask an agent for a boxed answer and record the local score of the reply; see `grade`."""
    reply = await team.act(name, **slots)
    await grade(team, env, reply.turn, reply.value)
    return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculation:
    """Result of asking a tool user for a program."""

    answer: str | None  # None if there is no program, or if it failed or printed no answer
    transcript: str  # the program with its output, as other agents read it


async def ask_tool_user(team: TeamSession, env: PlayedEnv, **slots: object) -> Calculation:
    """Ask the agent `tool_user`, run the program of its reply, and record its local score.

    The answer is the content of the box in the last printed line, or else that line. The score is
    that of Stronger-MAS: 1 for the right answer, 0 for a wrong one, -1 if there is no program or it
    failed.
    """
    reply = await team.act("tool_user", **slots)
    if reply.value is None:
        team.score(reply.turn, local=-1.0)
        return Calculation(answer=None, transcript=with_output("", "There was no program."))

    call = await env.run(reply.value)
    transcript = with_output(reply.value.strip(), call.result)
    if call.failed:
        team.score(reply.turn, local=-1.0)
        return Calculation(answer=None, transcript=transcript)

    last_line = ""
    if call.result != NO_OUTPUT:
        last_line = call.result.splitlines()[-1].strip()
    box = last_boxed(last_line)
    answer = last_line if box is None else box
    await grade(team, env, reply.turn, answer)
    return Calculation(answer=answer or None, transcript=transcript)


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
