"""Restarts of a part: so many in any hour, and counted."""

from __future__ import annotations

from rollout.base.restarts import Restarts, forget_restarts, restart_metrics


def test_a_part_is_started_so_often_in_any_hour() -> None:
    now = 0.0
    restarts = Restarts("a part", 2, clock=lambda: now)
    assert [restarts.take(), restarts.remaining] == [True, 1]
    now = 1800.0
    assert [restarts.take(), restarts.take(), restarts.remaining] == [True, False, 0]
    now = 3599.0
    assert not restarts.take()
    now = 3600.0  # the first is an hour ago
    assert [restarts.take(), restarts.take()] == [True, False]
    now = 9000.0
    assert restarts.remaining == 2
    assert restart_metrics()["restarts/a part"] == 3.0
    assert not Restarts("never", 0).take()
    assert "restarts/never" not in restart_metrics()
    forget_restarts()  # as the next run of this process begins
    assert restart_metrics() == {}
