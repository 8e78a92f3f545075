"""Codex and Claude Code, installed by npm, write a program through the gateway, and its output is scored."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollout.config.environment import EnvConfig, build_env
from rollout.orchestras.program import ProgramRules, program
from rollout.records.trajectory import Group, Status
from rollout.sandbox.guest.filters import can_confine
from tests.frameworks.training import AGENT_FILES, NPM_PACKAGES, PROGRAMS, sums
from tests.support.gateway import scripted_team
from tests.support.play import SEED, STEP, collect

AGENTS = ("codex", "codex-functions", "claude")

pytestmark = pytest.mark.skipif(
    not (NPM_PACKAGES / "node_modules").exists(),
    reason="`make test-coding-agents` installs the agents",
)


def shell_call(agent: str, command: str) -> dict[str, Any]:
    """Return the tool call with which an agent runs a command in a shell."""
    if agent == "claude":
        return {"name": "Bash", "arguments": {"command": command}}
    if agent == "codex-functions":
        return {"name": "exec_command", "arguments": {"cmd": command}}
    script = f"await tools.exec_command({json.dumps({'cmd': command})})"
    return {"name": "functions.exec", "arguments": {"input": script}}


def play(agent: str, folder: Path, *, printed: int, sandbox: list[str] | None) -> Group:
    """Play the task 1+1 twice with a model that writes a program that prints a number."""
    command = f"echo 'print({printed})' > answer.py"
    call = f"<tool_call>{json.dumps(shell_call(agent, command))}</tool_call>"

    def reply(prompt: str, number: int) -> str:
        last_message = prompt.rpartition("<|im_start|>user")[2]
        return "Done." if "<tool_response>" in last_message else call

    team, _ = scripted_team(folder / "model", reply)
    script = str(PROGRAMS / "code_agent.py")
    orchestra = partial(
        program,
        command=[sys.executable, script, agent, str(NPM_PACKAGES)],
        models={"*": "a"},
        sandbox=sandbox,
        rules=ProgramRules(deadline_s=120.0),
    )
    make_env = build_env(EnvConfig(name="math"))
    collection = collect([sums()[0]], team, make_env, orchestra, group_size=2, seed=SEED, step=STEP)
    return asyncio.run(collection)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("printed", "outcome"), [(2, 1.0), (3, 0.0)])
@pytest.mark.parametrize("agent", AGENTS)
def test_the_output_of_a_coding_agents_program_decides_the_reward(
    agent: str, printed: int, outcome: float, tmp_path: Path
) -> None:
    """Every trajectory is one conversation of two turns: the shell call, and the final message."""
    group = play(agent, tmp_path, printed=printed, sandbox=None)
    for trajectory in group.trajectories:
        assert trajectory.error == ""
        assert trajectory.status == Status.COMPLETED
        assert trajectory.outcome == outcome
        assert [turn.chat for turn in trajectory.turns] == ["a/0", "a/0"]
        call, last = trajectory.turns
        tokens = (*call.prompt_ids, *call.completion_ids)
        assert last.prompt_ids[: len(tokens)] == tokens
        assert last.text == "Done."


@pytest.mark.slow
@pytest.mark.skipif(not can_confine(), reason="needs Linux 6.12, whose Landlock knows ports")
def test_claude_code_works_in_the_sandbox(tmp_path: Path) -> None:
    group = play("claude", tmp_path, printed=2, sandbox=list(map(str, AGENT_FILES)))
    for trajectory in group.trajectories:
        assert trajectory.error == ""
        assert trajectory.outcome == 1.0
