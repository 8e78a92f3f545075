"""The page of benchmarks keeps rows that were not measured again; benchmarks use names that exist."""

import sys
from collections.abc import Callable

import pytest

from benchmarks import credit, gateway_loop_delay
from benchmarks.run_all import Result, page, parse
from mcore_mas.equations.turns import Advantages, Turns
from rollout.engines import rendering


def test_a_row_is_replaced_and_the_others_stay():
    first = page(
        [
            Result(name=name, ratio=2.0, goal=1.0, at_most=False, reference="plain", n=3)
            for name in ("load_a", "sort")
        ],
        "a machine",
    )
    (again, other) = parse(
        "3 M\nname=load_a ratio=2.50 at_most=3.00 reference=one two n=5\n9 s\nname=b ratio=1.0 goal=1.0 reference=c n=1"
    )
    assert other.name == "b"
    assert page([again], "another", first) == first.replace(
        "| load_a | 2.00 | ≥ 1.00 | plain | 3 | a machine |",
        "| load_a | 2.50 | ≤ 3.00 | one two | 5 | another |",
    )
    assert parse("name=load_a ratio=2.50 goal=1.00\n") == []


def test_the_reference_of_the_loops_delay_does_all_work_on_the_loop() -> None:
    with gateway_loop_delay.all_work_on_the_loop():
        sizes = [getattr(*item) for item in gateway_loop_delay.THREAD_SIZES.items()]
    assert sizes == [sys.maxsize] * 3
    assert sys.maxsize != rendering._LONG_CHAT_CHARS


@pytest.mark.parametrize("estimator", credit.ESTIMATORS.values(), ids=credit.ESTIMATORS)
def test_the_turns_of_the_benchmark_have_what_an_estimator_needs(
    estimator: Callable[[Turns], Advantages],
) -> None:
    assert estimator(credit.make_turns(1000)).values.isfinite().all()
