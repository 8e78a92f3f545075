"""Result line of a benchmark, which `benchmarks/run_all.py` reads."""

from __future__ import annotations


def print_result(
    name: str, ratio: float, *, goal: float, reference: str, repeats: int, at_most: bool = False
) -> None:
    """Print the result line.

    Args:
        name: name of the benchmark.
        ratio: ratio of our measurement and the reference's.
        goal: smallest ratio that is accepted, or the largest with `at_most`.
        reference: the other side of the ratio.
        repeats: number of measurements.
        at_most: True if a smaller ratio is better.
    """
    bound = "at_most" if at_most else "goal"
    print(f"name={name} ratio={ratio:.2f} {bound}={goal:.2f} reference={reference} n={repeats}")
