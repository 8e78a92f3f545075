"""Sandbox for model-written Python: isolated processes without network, other files or other processes.

box        runners of programs: this machine's pool of warm, isolated processes, and SandboxFusion's servers
session    one program in a jail, and cells that share variables
judge      tests of a program, whose expected answers stay on this side, and when two answers are the same
records    limits, verdicts and results
pool, jail, cgroup: the host's side of the wall, with the tiers of isolation; guest/: the far side
"""

from __future__ import annotations

from mcore_mas.rollout.sandbox.box import Runner, Sandbox, SandboxFusion
from mcore_mas.rollout.sandbox.records import RunLimits, RunResult, SandboxError, SandboxUnavailable, Verdict
from mcore_mas.rollout.sandbox.session import Session

__all__ = [
    "RunLimits",
    "RunResult",
    "Runner",
    "Sandbox",
    "SandboxError",
    "SandboxFusion",
    "SandboxUnavailable",
    "Session",
    "Verdict",
]
