"""Every estimator, with every choice of its options, against a second implementation in NumPy."""

import pytest

from mcore_mas.equations.advantages import ESTIMATORS
from tests.support.credit_oracle import largest_differences


@pytest.mark.slow
def test_estimators_agree_with_the_second_implementation() -> None:
    differences = largest_differences(25)
    for name, largest in sorted(differences.items()):
        print(f"{name:24s} {largest:.1e}")
    assert set(differences) == {*ESTIMATORS, "gae's targets"}
    assert max(differences.values()) < 1e-7, differences
