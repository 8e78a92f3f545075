"""A checkout with one bug, its hidden tests, and patches of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rollout.environments.protocol import Step
from rollout.environments.repository import RepositoryEnv, pack_instance
from rollout.records.trajectory import Task
from rollout.sandbox import Sandbox

SOURCE = "def add(a, b):\n    return a - b\n"
# pytest's settings of a checkout. Plug-ins of this environment, such as Hypothesis, take ten times as long to load as
# its tests run.
NO_PLUGINS = "[pytest]\naddopts = --disable-plugin-autoload\n"
_TESTS = "import calc\nfrom calc import add\n\n\ndef test_old():\n    assert True\n"


def replace_block(path: str, old: str, new: str) -> str:
    """Return a SEARCH/REPLACE block."""
    return f"{path}\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE"


def patch_of_add(body: str, top: str = "") -> str:
    """Return the patch that gives `add` another body, and adds lines at the top of its module."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return replace_block("calc.py", SOURCE.rstrip(), f"{top}\ndef add(a, b):\n{lines}".lstrip())


def play_patch(
    box: Sandbox,
    folder: Path,
    patch: str,
    hidden_tests: str,
    names: Sequence[str] = ("test_new",),
) -> Step:
    """Score a patch of the checkout.

    Args:
        box: runs the tests.
        folder: where the checkout is written.
        patch: of an agent.
        hidden_tests: source of tests that the checkout does not have.
        names: names of the hidden tests that the repair must make pass.
    """
    checkout = folder / "one"
    checkout.mkdir(exist_ok=True)
    (checkout / "calc.py").write_text(SOURCE)
    (checkout / "test_calc.py").write_text(_TESTS)
    (checkout / "pytest.ini").write_text(NO_PLUGINS)
    rows = [f" {line}" for line in _TESTS.splitlines()]
    rows += ["+"] + [f"+{line}" for line in hidden_tests.splitlines()]
    test_patch = "\n".join(["--- a/test_calc.py", "+++ b/test_calc.py", "@@ -1,6 +1,9 @@", *rows])
    answer = pack_instance(
        "one",
        fail_to_pass=[f"test_calc.py::{name}" for name in names],
        pass_to_pass=["test_calc.py::test_old"],
        test_patch=f"{test_patch}\n",
        shown=["calc.py"],
    )
    task = Task(
        id="t",
        prompt="add is wrong",
        answers=(answer,),
        env="repository",
        source="s",
        split="test",
    )

    async def score() -> Step:
        env = RepositoryEnv(task, sandbox=box, checkouts=str(folder))
        env.reset(task)
        return await env.step(patch)

    return asyncio.run(score())
