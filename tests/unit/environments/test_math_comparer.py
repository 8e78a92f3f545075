"""Child processes that compare math answers within limits."""

import os
import signal
import threading
import time

import pytest

from rollout.environments.math_comparer import Comparer
from rollout.environments.math_equality import AnswerComparison


def stop(comparer: Comparer) -> None:
    for child in comparer._idle.queue:
        child.stop()


@pytest.mark.slow
def test_an_endless_comparison_is_undecided_and_the_next_one_works() -> None:
    comparer = Comparer(limit_s=1)
    try:
        assert comparer.compare("10000000!", "5") is AnswerComparison.UNDECIDED
        assert comparer.compare("0.5", "\\frac{1}{2}") is AnswerComparison.EQUAL
        assert comparer.compare("0.4", "\\frac{1}{2}") is AnswerComparison.DIFFERENT
    finally:
        stop(comparer)


@pytest.mark.slow
def test_a_comparison_does_not_wait_for_one_that_hangs() -> None:
    comparer = Comparer()
    results: list[AnswerComparison] = []
    try:
        assert comparer.compare("0.5", "\\frac{1}{2}") is AnswerComparison.EQUAL
        busy = comparer._idle.queue[-1]._process.pid
        os.kill(busy, signal.SIGSTOP)
        hanging = threading.Thread(target=lambda: results.append(comparer.compare("1", "2")))
        hanging.start()
        while comparer._idle.qsize() == 2:
            time.sleep(0.01)
        assert comparer.compare("0.5", "\\frac{1}{2}") is AnswerComparison.EQUAL
        assert hanging.is_alive()
        os.kill(busy, signal.SIGKILL)
        hanging.join()
        assert results == [AnswerComparison.UNDECIDED]
    finally:
        stop(comparer)
