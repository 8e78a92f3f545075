"""Every estimator, with every choice of its options, against an independent one in numpy."""

import pytest

from mcore_mas.equations.advantages import ESTIMATORS
from tests.support.credit_oracle import largest_differences


@pytest.mark.slow
def test_every_estimator_is_what_numpy_says() -> None:
    differences = largest_differences(25)
    for name, largest in sorted(differences.items()):
        print(f"{name:24s} {largest:.1e}")
    assert set(differences) == {*ESTIMATORS, "gae's targets"}
    assert max(differences.values()) < 1e-7, differences
