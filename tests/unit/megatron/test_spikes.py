"""A spike is judged against the running median of the norms before it."""

import math

from mcore_mas.megatron.step.spikes import SpikeMonitor


def test_a_norm_far_above_the_median_is_a_spike() -> None:
    monitor = SpikeMonitor(factor=10.0, window=100, warmup=3)
    assert [monitor.observe(norm) for norm in (1.0, 3.0, 2.0)] == [False, False, False]
    # The median is 2, so the bound is 20; a norm at the bound is no spike.
    assert not monitor.observe(20.0)
    assert monitor.observe(25.1)  # the median of 1, 2, 3, 20 is 2.5


def test_no_verdict_on_finite_norms_before_the_warmup() -> None:
    monitor = SpikeMonitor(factor=2.0, warmup=5)
    assert not any(monitor.observe(norm) for norm in (1.0, 100.0, 1.0, 100.0, 1.0))
    assert monitor.observe(2.1)  # five norms with median 1 are known now


def test_a_norm_that_is_not_finite_is_a_spike_and_is_not_recorded() -> None:
    monitor = SpikeMonitor(factor=10.0, warmup=1)
    assert monitor.observe(math.nan)
    assert monitor.observe(math.inf)
    assert not monitor.observe(1.0)
    assert monitor.observe(math.nan)
    assert list(monitor.norms) == [1.0]


def test_norms_that_stay_high_stop_being_spikes() -> None:
    monitor = SpikeMonitor(factor=10.0, window=4, warmup=1)
    verdicts = [monitor.observe(norm) for norm in (1.0, 1.0, 1.0, 1.0, 50.0, 50.0, 50.0)]
    # windows before the last three: 1111, 1,1,1,50 (median 1), 1,1,50,50 (median 25.5)
    assert verdicts[4:] == [True, True, False]


def test_a_restored_monitor_continues_from_its_norms() -> None:
    first = SpikeMonitor(factor=10.0, window=3, warmup=2)
    for norm in (5.0, 1.0, 2.0, 3.0):
        first.observe(norm)
    second = SpikeMonitor(factor=10.0, window=3, warmup=2, norms=list(first.norms))
    assert list(second.norms) == [1.0, 2.0, 3.0]
    assert second.observe(20.1) and first.observe(20.1)
