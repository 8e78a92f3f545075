"""What a death costs: a run of ordinary size is killed at many moments, and every token counted.

`python -m tests.faults.deaths [DEATHS]`: so many for each staleness; the clock jumps, and the engines are simulated.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.support.simulated import Log, engines_of
from tests.unit.training.test_journal import sampled_by, session, train

STEPS, GROUPS, SIZE = 20, 4, 8
SETTINGS = (
    f"trainer.steps={STEPS}",
    f"trainer.tasks_per_step={GROUPS}",
    f"trainer.group_size={SIZE}",
    *(
        f"policies.{policy}.max_in_flight=32" for policy in ("solver", "verifier")
    ),  # nothing of a step waits
)


def main(deaths: int) -> None:
    """Raises AssertionError if a death costs more than 5 % of a run's tokens."""
    for staleness in (0, 1, 2):
        shares = []
        with tempfile.TemporaryDirectory() as temporary:
            ended: list[float] = []
            whole = session(Path(temporary, "whole"), staleness, *SETTINGS)
            told = Log(
                lambda step, metrics, ended=ended: ended.append(asyncio.get_running_loop().time())
            )
            assert train(replace(whole, logbook=told))
            for number in range(deaths):
                folder = Path(temporary, "killed")
                first = session(folder, staleness, *SETTINGS)
                assert not train(first, random.Random(number).uniform(0.01, 0.99) * ended[-1])
                second = session(folder, staleness, *SETTINGS)
                assert train(second)
                lost = sum(engine.lost for engine in engines_of(first).values())
                shares.append(lost / (sampled_by(first, second) + lost))
                shutil.rmtree(folder)
        mean, most = sum(shares) / len(shares), max(shares)
        print(
            f"staleness {staleness}: {deaths} deaths, {mean:.2%} of a run's tokens sampled again, at most {most:.2%}"
        )
        assert most <= 0.05


if __name__ == "__main__":
    main(int(*sys.argv[1:] or ["20"]))
