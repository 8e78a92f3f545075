"""Fixture of environments that run programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout.sandbox import Sandbox
from tests.support.sandboxes import started


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """Return the best sandbox of this machine, for the tests of one module."""
    sandbox = started("auto")
    yield sandbox
    sandbox.close()
