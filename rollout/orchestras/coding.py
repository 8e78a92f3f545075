"""Orchestras whose agents write programs.

`code_reflect` is UnityMAS-O's, `coder_tester` Stronger-MAS's and `dsbench` MAPPA's; in `tool_coder`
each of two agents keeps a chat of its own.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, PositiveInt

from rollout.base.errors import EnvError
from rollout.environments.data_science import SUBMIT
from rollout.environments.protocol import Case, PlayedEnv, Step, after_thought
from rollout.orchestras.replies import fenced, with_output
from rollout.records.trajectory import Task
from rollout.teams.roles import AgentReply
from rollout.teams.team import TeamSession

_NO_PROGRAM = "There was no program."


async def measure_pass_rate(env: PlayedEnv, program: str | None) -> float | None:
    """Return the share of the task's tests that a program passes; 0 without a program.

    The result is None if nobody knows the task's tests, as in a chat.

    Raises:
        EnvError: the environment does not grade programs.
    """
    step = await env.preview(fenced(program))
    if step.unscored:
        return None
    if "pass_rate" not in step.metrics:
        raise EnvError("the environment does not grade programs; set env.name to code")
    return step.metrics["pass_rate"]


async def _try_program(team: TeamSession, env: PlayedEnv, reply: AgentReply) -> Step:
    """Score a reply by the pass rate of its program, and run the program on the visible tests."""
    pass_rate = await measure_pass_rate(env, reply.value)
    if pass_rate is not None:
        team.score(reply.turn, pass_rate=pass_rate)
    return await env.step(f"<run>\n{fenced(reply.value)}\n</run>")


def _passes_visible_tests(reply: AgentReply, trial: Step) -> bool:
    """Return True if a reply has a program, and in its trial all visible tests passed.

    A task whose tests nobody knows has no visible tests that could fail.
    """
    return bool(reply.value) and (trial.unscored or trial.metrics["visible_rate"] == 1)


async def code_reflect(
    task: Task, team: TeamSession, env: PlayedEnv, *, max_turns: PositiveInt = 3
) -> None:
    """Ask `planner`, `coder` and `reflector` in turn until a program passes the visible tests.

    The last program is final, and the reflector is not asked about it. Templates may use the slots
    `problem` and `history`: for each round, the plan, the program, its result on the visible tests,
    and the reflection. The coder's template may also use `plan`. Of a planner's or a reflector's
    reply, the other agents see only the content of its tag, or "" if the reply is malformed. A
    reply of the coder without a program is tried as an empty program; as the last reply, it leaves
    the team without a program.

    The turns of the coder have the score `pass_rate`: the share that the program passes of the tests
    that decide the outcome, which are the hidden ones, or the visible ones if there are no others.
    The released code measures it on the visible tests.

    Args:
        max_turns: maximum number of rounds; each has one program.
    """
    problem = env.reset(task)
    history = ""
    for round_number in range(1, max_turns + 1):
        planned = await team.act("planner", problem=problem, history=history)
        plan = planned.value or ""
        coded = await team.act("coder", problem=problem, plan=plan, history=history)
        trial = await _try_program(team, env, coded)
        if round_number == max_turns or _passes_visible_tests(coded, trial):
            break
        history += f"{plan}\n{fenced(coded.value) or _NO_PROGRAM}\n{trial.observation}\n\n"
        reflection = await team.act("reflector", problem=problem, history=history)
        history += f"{reflection.value or ''}\n\n"
    await env.step(fenced(coded.value))


async def coder_tester(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_turns: PositiveInt = 5,
    max_cases: PositiveInt = 8,
    malformed: float = -2.0,
) -> None:
    """Ask `coder` and `tester` at the same time until the program passes the tester's tests.

    The last program is final. Templates may use the slots `problem` and `history`: for each round,
    the program and its result on each test of the round, with input and output of those that failed.
    After a malformed reply of either agent the program is not run on the tests, and the next round
    begins. A malformed last program leaves the team without a program.

    Local scores are those of Stronger-MAS. The coder's is the share of the task's tests that the
    program passes. The tester's is the share of its tests that the task's solution passes; it is
    absent if the task has no solution, which the reward `local_team` accepts with
    `missing_local: zero`.

    Args:
        max_turns: maximum number of rounds; in each, both agents are asked once.
        max_cases: number of tests of a reply that are used; those after them are ignored.
        malformed: local score of a malformed reply.
    """
    problem = env.reset(task)
    history = ""
    for _ in range(max_turns):
        slots = {"problem": problem, "history": history}
        coded, tested = await asyncio.gather(
            team.act("coder", **slots), team.act("tester", **slots)
        )
        program = coded.value
        all_cases = json.loads(tested.value or "[]")
        cases: list[Case] = [(stdin, expected) for stdin, expected in all_cases[:max_cases]]

        coder_score: float | None = malformed
        if program is not None:
            coder_score = await measure_pass_rate(env, program)
        if coder_score is not None:
            team.score(coded.turn, local=coder_score)
        tester_score: float | None = malformed
        if cases:
            tester_score = await env.agreement(cases)
        if tester_score is not None:
            team.score(tested.turn, local=tester_score)

        if program is None:
            history += f"{_NO_PROGRAM}\n\n"
            continue
        if not cases:
            history += "There was no test.\n\n"
            continue
        result = await env.check(program, cases)
        # The tester's tests are run in the form of the task's tests: with standard input, or as calls of
        # a function. If the task has no tests, as in a chat, they cannot be run: the program is final.
        if result.unscored or result.metrics["check_rate"] == 1:
            break
        history += f"{fenced(program)}\n{result.observation}\n\n"
    await env.step(fenced(coded.value))


async def tool_coder(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_turns: PositiveInt = 3,
    max_calls: PositiveInt = 6,
) -> None:
    """Let `coder` write programs with tools, and `reviewer` review them, until visible tests pass.

    The last program is final, and the reviewer is not asked about it. Each agent keeps its own
    chat for the whole task. The coder's template may use the slot `problem`; later messages to the
    coder are the result on the visible tests and the review, without the review if it is malformed.
    The reviewer's template may use `problem`, `program` and `outcome`, the result on the visible
    tests; later messages to the reviewer are the next program and its result.

    The turns in which the coder hands in a program have the score `pass_rate`: the share of the
    task's tests that the program passes.

    Args:
        max_turns: maximum number of programs.
        max_calls: maximum number of replies with tool calls before each program; the calls of a
            further reply are not made.
    """
    problem = env.reset(task)
    coder = team.chat("coder")
    reviewer = team.chat("reviewer")
    await coder.ask(problem=problem)
    for turn in range(1, max_turns + 1):
        reply = await coder.run(max_turns=max_calls)
        program = fenced(reply.value)
        trial = await _try_program(team, env, reply)
        if turn == max_turns or coder.full or _passes_visible_tests(reply, trial):
            break
        if reviewer.latest is None:
            review = await reviewer.ask(problem=problem, program=program, outcome=trial.observation)
        else:
            review = await reviewer.say(f"{program}\n\n{trial.observation}")
        await coder.say(f"{trial.observation}\n\n{review.value or ''}".strip())
    await env.step(program)


# Files that each agent of `dsbench` must write, by default.
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
    """Let each agent of `artefacts` write programs until its files exist; then submit the result.

    The agents work one after the other. The next agent starts even if the previous one has not
    written all its files.

    Templates may use the slots `problem`; `handed`, the last reply of each earlier agent, without
    its thought; `files`, the files of the working folder; `history`, the agent's own programs with
    their output; and `wanted`, the files that the agent must write. A malformed reply runs nothing.
    The local score of a turn is the share of the agent's files that exist after it, and 0 for a
    malformed reply.

    Args:
        max_turns: maximum number of programs of each agent.
        artefacts: files that each agent must write, by agent; the agents work in this order.
    """
    problem = env.reset(task)
    handed = ""
    sizes = await env.files()  # of the files in the working folder
    for agent, wanted in artefacts.items():
        history = ""
        last_text = ""
        for _ in range(max_turns):
            reply = await team.act(
                agent,
                problem=problem,
                handed=handed,
                files="\n".join(f"{name} ({size})" for name, size in sizes.items()),
                history=history,
                wanted=", ".join(wanted),
            )
            last_text = after_thought(reply.text)
            if reply.value is None:
                team.score(reply.turn, local=0.0)
                history += f"{_NO_PROGRAM}\n\n"
                continue

            call = await env.run(reply.value)
            sizes = await env.files()
            share = sum(name in sizes for name in wanted) / max(len(wanted), 1)
            team.score(reply.turn, local=share)
            if share == 1 or not wanted:
                break
            history += f"{with_output(reply.value.strip(), call.result)}\n\n"
        handed += f"## {agent}\n{last_text}\n\n"
        await env.forget()
    await env.step(SUBMIT)
