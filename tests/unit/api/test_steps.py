"""The steps of a training that a program takes one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio
from pathlib import Path

from mcore_mas.api.run import _Steps
from mcore_mas.training import train
from mcore_mas.training.joblog import Stopped


def steps_without_end(config, after_step):
    async def go():
        number = 0
        while await after_step(number, {}):
            number += 1
        await asyncio.to_thread(print, "saved step", number)  # as a checkpoint is written
        raise Stopped("stopped")

    asyncio.run(go())


train.train = steps_without_end
steps = _Steps(Path("run/config.yaml"))
print("took step", steps.next()["step"], "and", steps.next()["step"])
"""


def test_a_program_that_ends_in_the_middle_of_its_loop_stops_the_training_and_ends() -> None:
    """It once waited for ever for the training, which waited to be asked for its next step."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "took step 0 and 1\nsaved step 1\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "run: stopped\n")
