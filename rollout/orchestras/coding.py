"""Teams that write programs: UnityMAS-O's and Stronger-MAS's coding teams, one with chats, MAPPA's data scientists."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, PositiveInt

from rollout.base.errors import EnvError
from rollout.environments.data_science import SUBMIT
from rollout.environments.protocol import Case, PlayedEnv, after_thought
from rollout.orchestras.replies import fenced, with_output
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession


async def code_reflect(
    task: Task, team: TeamSession, env: PlayedEnv, *, max_turns: PositiveInt = 3
) -> None:
    """Ask `planner`, `coder` and `reflector` in turn, until a program passes the visible tests or `max_turns` programs
    are spent. The last program is final, and nobody reflects on it.

    Templates may use the slots `problem`, `history` (of every turn the plan, the program, what became of it on the
    visible tests, and the reflection) and the coder's also `plan`, this turn's. Of the planner and the reflector only
    the tag's content is handed on, "" when it is malformed. A reply without a program is tried as an empty one, and as
    the last one scored as none.

    Score `pass_rate` of every turn of the coder: the share of the task's tests that its program passes, 0 without one.
    These are the tests that decide the outcome, which nobody sees; the released code measures on the visible ones.

    Args:
        max_turns: programs, at most.
    """
    problem = env.reset(task)
    history = ""
    for turn in range(1, max_turns + 1):
        plan = (await team.act("planner", problem=problem, history=history)).value or ""
        code = await team.act("coder", problem=problem, plan=plan, history=history)
        program = fenced(code.value)
        team.score(code.turn, pass_rate=await pass_rate(env, code.value))
        tried = await env.step(f"<run>\n{program}\n</run>")
        if turn == max_turns or (code.value and tried.metrics["visible_rate"] == 1):
            break
        history += f"{plan}\n{program or 'There was no program.'}\n{tried.observation}\n\n"
        reflection = await team.act("reflector", problem=problem, history=history)
        history += f"{reflection.value or ''}\n\n"
    await env.step(program)


async def coder_tester(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_turns: PositiveInt = 5,
    max_cases: PositiveInt = 8,
    malformed: float = -2.0,
) -> None:
    """Ask `coder` and `tester` side by side until the program passes all the tests, or `max_turns` are spent.

    The last program is final. Templates may use the slots `problem` and `history`: every program with what came of it
    on the first `max_cases` tests written beside it, mismatches in full. After a malformed reply of either there is
    nothing to run, and they go on; a malformed last program leaves the team without one.

    Local scores, as in Stronger-MAS: of the coder the share of the task's tests that its program passes; of the tester
    the share of its tests that the task's own solution passes, none where the task has no solution (the reward
    `local_team` then wants `missing_local: zero`); `malformed` of either for a malformed reply.

    Args:
        max_turns: programs, at most.
        max_cases: tests of a reply that count.
        malformed: local score of a malformed reply.
    """
    problem = env.reset(task)
    history = ""
    for _ in range(max_turns):
        slots = {"problem": problem, "history": history}
        coded, tested = await asyncio.gather(
            team.act("coder", **slots), team.act("tester", **slots)
        )
        cases: list[Case] = [
            (given, expected) for given, expected in json.loads(tested.value or "[]")
        ][:max_cases]
        team.score(
            coded.turn,
            local=malformed if coded.value is None else await pass_rate(env, coded.value),
        )
        agreed = await env.agreement(cases) if cases else malformed
        if agreed is not None:
            team.score(tested.turn, local=agreed)
        if coded.value is None or not cases:
            history += f"There was no {'program' if coded.value is None else 'test'}.\n\n"
            continue
        tried = await env.check(coded.value, cases)
        if tried.metrics["check_rate"] == 1:
            break
        history += f"{fenced(coded.value)}\n{tried.observation}\n\n"
    await env.step(fenced(coded.value))


async def tool_coder(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_turns: PositiveInt = 3,
    max_calls: PositiveInt = 6,
) -> None:
    """Let `coder` work with its tools and hand in programs, which `reviewer` comments on, until one passes the visible
    tests or `max_turns` programs are spent. The last program is final, and nobody reviews it.

    Both hold one chat. The coder's template may use the slot `problem`; it is then told the review, of a malformed one
    the visible tests alone. The reviewer's template may use `problem`, `program` and `outcome` (on the visible tests);
    it is then told each further program and its outcome.

    Score `pass_rate` of every turn in which the coder hands in: the share of the task's tests that its program passes.

    Args:
        max_turns: programs, at most.
        max_calls: replies of an agent in a row that may call tools.
    """
    problem = env.reset(task)
    coder, reviewer = team.chat("coder"), team.chat("reviewer")
    await coder.ask(problem=problem)
    for turn in range(1, max_turns + 1):
        reply = await coder.run(max_turns=max_calls)
        program = fenced(reply.value)
        team.score(reply.turn, pass_rate=await pass_rate(env, reply.value))
        tried = await env.step(f"<run>\n{program}\n</run>")
        if turn == max_turns or coder.full or (reply.value and tried.metrics["visible_rate"] == 1):
            break
        if reviewer.latest is None:
            review = await reviewer.ask(problem=problem, program=program, outcome=tried.observation)
        else:
            review = await reviewer.say(f"{program}\n\n{tried.observation}")
        await coder.say(f"{tried.observation}\n\n{review.value or ''}".strip())
    await env.step(program)


async def pass_rate(env: PlayedEnv, program: str | None) -> float:
    """The share of the task's tests that a program passes, 0 without one.

    Raises:
        EnvError: the environment grades no programs.
    """
    metrics = (await env.preview(fenced(program))).metrics
    if "pass_rate" not in metrics:
        raise EnvError("the environment grades no programs; name code in env")
    return metrics["pass_rate"]


ARTEFACTS: Mapping[str, Sequence[str]] = {
    "engineer": ("X_train.pkl", "y_train.pkl", "X_test.pkl"),
    "modeler": ("model.pkl",),
    "analyst": ("submission.csv",),
}


async def dsbench(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_turns: PositiveInt = 4,
    artefacts: Annotated[Mapping[str, Sequence[str]], Field(min_length=1)] = ARTEFACTS,
) -> None:
    """Let each agent of `artefacts`, in its order, write programs until its files exist or `max_turns` are spent; then
    the submission is scored.

    An agent who leaves something out is followed by the next all the same. Templates may use the slots `problem`,
    `handed` (the last reply of each agent before, without its thoughts), `files` (the folder's), `history` (the agent's
    own programs with what they printed) and `wanted` (the files it is to leave). A malformed reply runs nothing. Local
    score of a turn: the share of the agent's files that exist after it, 0 for a malformed reply.

    Args:
        max_turns: programs of each agent, at most.
        artefacts: by agent, in the order in which they work: the files that the agent must leave.
    """
    problem = env.reset(task)
    handed, there = "", await env.files()
    for agent, wanted in artefacts.items():
        history, said = "", ""
        for _ in range(max_turns):
            slots = {
                "problem": problem,
                "handed": handed,
                "history": history,
                "wanted": ", ".join(wanted),
            }
            files = "\n".join(f"{name} ({size})" for name, size in there.items())
            reply = await team.act(agent, **slots, files=files)
            said = after_thought(reply.text)
            if reply.value is None:
                team.score(reply.turn, local=0.0)
                history += "There was no program.\n\n"
                continue
            call = await env.run(reply.value)
            there = await env.files()
            share = sum(name in there for name in wanted) / max(len(wanted), 1)
            team.score(reply.turn, local=share)
            if share == 1 or not wanted:
                break
            history += f"{with_output(reply.value.strip(), call.result)}\n\n"
        handed += f"## {agent}\n{said}\n\n"
        await env.forget()
    await env.step(SUBMIT)
