"""Play published environments of verifiers and OpenEnv, and train two of them.

python -m tests.environments
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from statistics import fmean

from rollout.records.trajectory import Status
from tests.environments.published import ENVIRONMENTS, Published
from tests.environments.training import TRAININGS, train


def version_of(environment: Published) -> str:
    """Return the installed version of an environment's package."""
    program = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    completed = subprocess.run(
        [environment.python / "python", "-c", program, environment.package],
        capture_output=True,
        text=True,
        check=True,
    )
    return completed.stdout.strip()


def main() -> int:
    """Print a line for each environment and for each training; return 1 if an environment failed."""
    failed = 0
    for name, environment in ENVIRONMENTS.items():
        trajectory = environment.play()
        failed += trajectory.status is Status.FAILED
        print(
            f"{name}: {environment.package} {version_of(environment)}: {trajectory.status.value}, "
            f"{len(trajectory.turns)} turns, reward {trajectory.outcome:g} {trajectory.error}",
            flush=True,
        )
    for team in TRAININGS:
        before, after = asyncio.run(train(team))
        gain = fmean(after) - fmean(before)
        print(
            f"{team}: reward {fmean(before):.3f} in the first two steps, {fmean(after):.3f} in the "
            f"last two: {'gain' if gain > 0 else 'no gain'} {gain:+.3f}",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
