"""SWE-bench's rows (arXiv 2310.06770): an issue of a repository, and which tests it should make pass."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rollout.envs.patches import BadPatch, parse_patch
from rollout.envs.repository import pack_instance
from rollout.tasks.files.problem import BadRow, Problem, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class SweBench:
    """SWE-bench, its Lite and its Verified: `instance_id`, `problem_statement`, `patch`, `test_patch`, `FAIL_TO_PASS`,
    `PASS_TO_PASS`. Agents read the files that the right patch changes, which is its "oracle" setting.
    """

    env: str = "repository"

    def problem(self, row: Row) -> Problem | None:
        """The issue with its tests, None without a test that it should make pass.

        Raises:
            BadRow: the row is not of this format.
        """
        try:
            name, issue = str(row["instance_id"]), str(row["problem_statement"])
            fail, keep = _names(row["FAIL_TO_PASS"]), _names(row["PASS_TO_PASS"])
            shown = sorted({edit.path for edit in parse_patch(row["patch"])})
            parse_patch(row["test_patch"])
            tests = pack_instance(name, fail_to_pass=fail, pass_to_pass=keep, test_patch=row["test_patch"], shown=shown)
        except (KeyError, TypeError, ValueError, AttributeError, BadPatch) as error:
            raise BadRow(f"is no instance of SWE-bench ({type(error).__name__}: {error})") from error
        return Problem(question=issue, prompt=issue.strip(), answers=(tests,), name=name) if fail else None


def _names(value: Any) -> list[str]:
    """Tests by name, as a list or as its JSON text."""
    names = json.loads(value) if isinstance(value, str) else list(value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a test's name is no text")
    return names
