"""Charts of metrics: their titles, units and members."""

from __future__ import annotations

import pytest

from mcore_mas.reports.metric_titles import MetricChart, metric_chart


@pytest.mark.parametrize(
    ("name", "chart", "member", "title", "unit"),
    [
        ("reward/mean", "reward/mean", "", "Mean reward of a turn", ""),
        (
            "agent/solver/valid_ratio",
            "agent/*/valid_ratio",
            "solver",
            "Well-formed replies by agent",
            "share",
        ),
        (
            "validation/gsm8k/accuracy",
            "validation/*/accuracy",
            "gsm8k",
            "Validation accuracy by source",
            "share",
        ),
        (
            "opponent/rival/score",
            "opponent/*/score",
            "rival",
            "Mean score by opponent",
            "share",
        ),
        ("opponent/rating", "opponent/rating", "", "Elo rating", ""),
        # Names that the table lacks.
        ("agent/a.b-c/new_metric", "agent/*/new_metric", "a.b-c", "New metric by agent", ""),
        ("policy/p/time/mfu", "policy/*/time/mfu", "p", "Time mfu by policy", "share"),
        ("policy/p/device_s", "policy/*/device_s", "p", "Device s by policy", "s"),
        ("time/words_per_s", "time/words_per_s", "", "Time words per s", ""),
        ("chat/tool_share", "chat/tool_share", "", "Chat tool share", "share"),
        ("agent/only", "agent/only", "", "Agent only", ""),
        ("", "", "", "", ""),
    ],
)
def test_a_metric_is_a_line_of_a_chart(
    name: str, chart: str, member: str, title: str, unit: str
) -> None:
    expected = {"chart": chart, "member": member, "title": title, "unit": unit}
    assert metric_chart(name) == MetricChart(**expected)  # type: ignore[arg-type]
