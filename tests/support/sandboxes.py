"""Sandboxes for tests."""

from __future__ import annotations

import asyncio

import pytest

from rollout.sandbox import RunLimits, RunResult, Sandbox, SandboxUnavailable, Verdict

REFUSED = """
import os, socket, ctypes
def refused(call):
    try:
        value = call()
    except (OSError, EOFError):
        return True
    return value
"""
LIMITS = RunLimits(wall_s=20.0, cpu_s=4, memory_mb=256, processes=24)


def started(tier: str, **options: object) -> Sandbox:
    """Return a started sandbox of this tier; skip the test if the machine has no such tier."""
    sandbox = Sandbox(LIMITS, slots=2, tier=tier, **options)  # type: ignore[arg-type]
    try:
        asyncio.run(sandbox.start())
    except SandboxUnavailable as reason:
        pytest.skip(f"no {tier} here: {reason}")
    return sandbox


def run(box: Sandbox, source: str, limits: RunLimits | None = None, **options: object) -> RunResult:
    """Run one program; return its result."""
    return asyncio.run(box.run(source, limits=limits, **options))  # type: ignore[arg-type]


def assert_refused(box: Sandbox, expression: str, setup: str = "") -> None:
    """Assert that an expression raises OSError in the sandbox."""
    result = run(box, f"{REFUSED}{setup}\nprint(refused(lambda: {expression}))")
    assert (result.stdout, result.verdict) == ("True\n", Verdict.OK), result
