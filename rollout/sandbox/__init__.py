"""Sandbox for model-written Python: isolated processes without network, other files or other processes."""

from rollout.sandbox.box import Runner, Sandbox, SandboxFusion
from rollout.sandbox.records import RunLimits, RunResult, SandboxError, SandboxUnavailable, Verdict
from rollout.sandbox.session import Session

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
