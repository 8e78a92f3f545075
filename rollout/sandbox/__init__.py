"""Sandbox for model-written Python: processes without network or other files, unless the tier is unisolated."""

from rollout.sandbox.box import Sandbox
from rollout.sandbox.fusion import SandboxFusion
from rollout.sandbox.fusion_session import FusionSession
from rollout.sandbox.records import RunLimits, RunResult, SandboxError, SandboxUnavailable, Verdict
from rollout.sandbox.runner import Runner
from rollout.sandbox.session import Session

__all__ = [
    "FusionSession",
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
