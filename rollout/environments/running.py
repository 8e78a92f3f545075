"""Environments that run programs, in this process's sandbox or on a server, and the options that they share."""

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

Tier = Literal["auto", "namespaces", "landlock", "unisolated"]  # of this machine's sandbox
PRINTED_CHARS = 4000  # of what a program printed


@dataclass(eq=False, kw_only=True)
class SandboxedEnv:
    """An environment of one task that runs programs.

    Args:
        server: address of a SandboxFusion server that runs them; null: this machine.
        tier: how programs are isolated on this machine.
        cpu_s: CPU seconds of a program; on the clock it has twice as many.
        memory_mb: memory of a program.
        cores: that a program computes on, with all that it starts.
    """

    task: Task = field(kw_only=False)
    sandbox: Runner | None = None  # in place of a server and of this process's own
    server: Url | None = None
    tier: Tier = "auto"
    cpu_s: PositiveInt = 20
    memory_mb: PositiveInt = 512
    cores: PositiveInt = 1

    @property
    def runner(self) -> Runner:
        """What runs its programs."""
        if self.sandbox is not None:
            return self.sandbox
        return _fusion(self.server) if self.server else own_sandbox(self.tier)

    @property
    def limits(self) -> RunLimits:
        """Of each run."""
        return RunLimits(
            cpu_s=self.cpu_s, wall_s=2.0 * self.cpu_s, memory_mb=self.memory_mb, cores=self.cores
        )


class CalculatingEnv(SandboxedEnv):
    """One whose agents may run programs on the way (see `PlayedEnv`)."""

    async def run(self, program: str) -> ToolCall:
        result = await self.runner.run(program, limits=self.limits)
        failed = result.verdict is not Verdict.OK
        shown = (
            result if failed else replace(result, stderr="")
        )  # a warning is no part of an answer
        return ToolCall(
            tool="python", query=program, result=render_result(shown, PRINTED_CHARS), failed=failed
        )


@cache
def own_sandbox(tier: Tier) -> Sandbox:
    """This process's sandbox, one for all trajectories; it starts with the first program."""
    sandbox = Sandbox(tier=tier)
    atexit.register(sandbox.close)
    return sandbox


_fusion = cache(SandboxFusion)
