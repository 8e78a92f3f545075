"""The data-science pipeline coached in MAPPA: a data engineer, a modeler and an analyst, who hand on files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Protocol

from pydantic import Field, PositiveInt

from rollout.base.tags import after_thought
from rollout.environments.data_science import SUBMIT
from rollout.environments.protocol import Env, Keeping, Running
from rollout.orchestras.reason_tool import parse_program
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

ARTEFACTS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "engineer": ("X_train.pkl", "y_train.pkl", "X_test.pkl"),
        "modeler": ("model.pkl",),
        "analyst": ("submission.csv",),
    }
)
_SYSTEM = "You are a member of a team of three that builds models of tables, one after the other."
_USER = """# Task
{problem}

# What your colleagues before you said
{handed}

# Files in the working folder, with their sizes in bytes
{files}

# Your programs so far, and what they printed
{history}

# Your role
"""
_END = """ Write one Python program for the next step; variables of your own earlier programs are still there, those
of your colleagues are not. You are done as soon as these files exist: {wanted}. Put the program into a block fenced by
```python and ```."""

register_agent(
    "data_engineer",
    system=_SYSTEM,
    user=_USER
    + "You are the data engineer. Look at the tables, clean them, and save features and target for the modeler."
    + _END,
)(parse_program)

register_agent(
    "modeler",
    system=_SYSTEM,
    user=_USER
    + "You are the modeler. Load what the data engineer saved, fit a model to it, and save the model."
    + _END,
)(parse_program)

register_agent(
    "analyst",
    system=_SYSTEM,
    user=_USER
    + "You are the analyst. Predict the test rows with the model, and save the predictions as the task asks for them."
    + _END,
)(parse_program)


class WorkshopEnv(Env, Running, Keeping, Protocol):
    """A world in which programs run in one folder."""


async def dsbench(
    task: Task,
    team: TeamSession,
    env: WorkshopEnv,
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

    Raises:
        EnvError: the environment cannot run programs or keep files.
    """
    problem = env.reset(task)
    handed, there = "", await env.files()
    for agent, wanted in artefacts.items():
        history, said = "", ""
        for _ in range(max_turns):
            slots = {"problem": problem, "handed": handed, "history": history, "wanted": ", ".join(wanted)}
            reply = await team.act(agent, **slots, files=_listing(there))
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
            history += f"```python\n{reply.value.strip()}\n```\n{call.result}\n\n"
        handed += f"## {agent}\n{said}\n\n"
        await env.forget()
    await env.step(SUBMIT)


def _listing(files: Mapping[str, int]) -> str:
    return "\n".join(f"{name} ({size})" for name, size in files.items())
