"""Base classes of environments that run programs, in this process's sandbox or on a server."""

import atexit
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from pydantic import PositiveInt

from rollout.base.urls import Url
from rollout.environments.protocol import ToolCall
from rollout.records.trajectory import Task
from rollout.sandbox import RunLimits, Runner, Sandbox, SandboxFusion, Verdict
from rollout.sandbox.records import render_result

# Isolation of programs in the sandbox of this machine.
Tier = Literal["auto", "namespaces", "landlock", "unisolated"]

PRINTED_CHARS = 4000  # maximum length of a program's output that an agent is shown


@dataclass(eq=False, kw_only=True)
class SandboxedEnv:
    """Base class of environments that run programs; it has their options.

    Args:
        server: address of a SandboxFusion server that runs programs; null: this machine.
        tier: tier of isolation of programs on this machine.
        cpu_s: CPU seconds that a program may take; its limit of wall time is twice as long.
        memory_mb: memory that a program may use.
        cores: cores that a program and its children share.
    """

    task: Task = field(kw_only=False)
    # Runner in place of `server` and of this process's sandbox, such as one that tests share.
    sandbox: Runner | None = None
    server: Url | None = None
    tier: Tier = "auto"
    cpu_s: PositiveInt = 20
    memory_mb: PositiveInt = 512
    cores: PositiveInt = 1

    @property
    def runner(self) -> Runner:
        """Sandbox or server that runs the programs."""
        if self.sandbox is not None:
            return self.sandbox
        if self.server:
            return sandbox_server(self.server)
        return local_sandbox(self.tier)

    @property
    def limits(self) -> RunLimits:
        """Limits of each run."""
        return RunLimits(
            cpu_s=self.cpu_s, wall_s=2.0 * self.cpu_s, memory_mb=self.memory_mb, cores=self.cores
        )


class CalculatingEnv(SandboxedEnv):
    """Base class of environments whose agents may run programs before they answer."""

    async def run(self, program: str) -> ToolCall:
        """Run an agent's Python program; see `PlayedEnv.run`."""
        result = await self.runner.run(program, limits=self.limits)
        failed = result.verdict is not Verdict.OK
        if not failed:
            # Warnings of a program that succeeds are not part of its result.
            result = replace(result, stderr="")
        return ToolCall(
            tool="python",
            query=program,
            result=render_result(result, PRINTED_CHARS),
            failed=failed,
        )


@cache
def local_sandbox(tier: Tier) -> Sandbox:
    """Return this process's sandbox of a tier, which all trajectories share.

    It starts with its first run.
    """
    sandbox = Sandbox(tier=tier)
    atexit.register(sandbox.close)
    return sandbox


@cache
def sandbox_server(server: Url) -> SandboxFusion:
    """Return this process's client of a SandboxFusion server."""
    return SandboxFusion(server)
