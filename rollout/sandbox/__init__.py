"""Model-written Python, run where it can do no harm.

box        the sandbox of this machine: a pool of warm, isolated processes; session: cells that share variables
fusion     the same by a server that speaks SandboxFusion's protocol
judge      tests of a program, whose expected answers stay on this side; compare: when two answers are the same
tiers      how programs are kept in, and what they may read
pool, zygote, jail, execute, cgroup, memory, verdicts: the host's side of the wall; guest/: the far side
"""

from __future__ import annotations

from rollout.sandbox.box import Sandbox
from rollout.sandbox.fusion import SandboxFusion
from rollout.sandbox.judge import Runner
from rollout.sandbox.records import Limits, Result, SandboxError, SandboxUnavailable, Verdict
from rollout.sandbox.session import Session

__all__ = [
    "Limits",
    "Result",
    "Runner",
    "Sandbox",
    "SandboxError",
    "SandboxFusion",
    "SandboxUnavailable",
    "Session",
    "Verdict",
]
