"""Sandbox for model-written Python: isolated processes without network, other files or other processes."""

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
