"""Sandboxes of the tiers that this machine has, each started once per test module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout.sandbox import Sandbox
from tests.support.sandboxes import started


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Return a sandbox that isolates."""
    sandbox = started(request.param)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def spacious() -> Iterator[Sandbox]:
    """Return a sandbox whose programs may start processes."""
    sandbox = started("namespaces")
    yield sandbox
    sandbox.close()
