"""What chats and the gateway cost beside generation, by the benchmarks' own measure of processor time."""

from __future__ import annotations

import pytest

from benchmarks import chat_tokenising, gateway_overhead
from benchmarks.run_all import Result, parse


def measured(output: str) -> Result:
    """The one result that a benchmark printed."""
    (result,) = parse(output)
    return result


def test_tokenising_takes_two_percent_of_a_chat_of_128_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_tokenising, "CHATS", 1)
    monkeypatch.setattr(chat_tokenising, "REPEATS", 1)
    chat_tokenising.main()
    result = measured(capsys.readouterr().out)
    assert chat_tokenising.TURNS == 128 and 0 < result.ratio <= result.goal == 2.0  # percent


def test_calls_through_the_gateway_cost_three_percent_of_generation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"CHATS": 8, "TURNS": 2, "REPEATS": 1}.items():
        monkeypatch.setattr(gateway_overhead, name, value)
    gateway_overhead.main()
    result = measured(capsys.readouterr().out)
    assert result.ratio >= result.goal == 0.97
