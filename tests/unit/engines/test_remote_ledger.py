"""Budgets hold exactly under concurrent calls, and recorded replies survive a kill."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest

from rollout.engines.remote import Answer, RemoteConfig, RemoteError, ReplySettings
from rollout.engines.remote.caller import Caller, Tally
from rollout.engines.remote.config import BudgetConfig
from rollout.engines.remote.ledger import BudgetExhausted, Ledger, LedgerReply, Spending
from rollout.records.trajectory import Group, Message
from rollout.rewards.coach import Coach
from tests.support.chat_server import Response, chat_server, says
from tests.support.coached import config, group, trajectory, turn

ROOT = Path(__file__).resolve().parents[3]
ANSWER = Answer(text="hi", finish_reason="stop", prompt_tokens=1, completion_tokens=2)


def ask_many(caller_config: RemoteConfig, folder: Path, count: int) -> tuple[int, Spending]:
    """Ask different prompts of 36 bytes at once; return the number of answers and the spending."""

    async def run() -> tuple[int, Spending]:
        caller = Caller(caller_config, folder)
        calls = []
        for number in range(count):
            messages = [Message(role="user", content=f"{number:036d}")]
            calls.append(caller.ask("a", messages, ReplySettings(max_tokens=100), Tally()))
        results = await asyncio.gather(*calls, return_exceptions=True)
        spent = caller.spent
        await caller.aclose()
        assert all(isinstance(result, Answer | BudgetExhausted) for result in results)
        return sum(isinstance(result, Answer) for result in results), spent

    return asyncio.run(run())


def test_the_budget_of_calls_holds_over_two_starts(tmp_path: Path) -> None:
    with chat_server(says("x", delay_s=0.02)) as server:
        limited = config(server.url, budget={"calls": 7})
        assert ask_many(limited, tmp_path, 50) == (7, Spending(calls=7, tokens=105, cost_nanos=0))
        assert len(server.bodies) == 7
        # The second start finds seven replies, and may send no call.
        answers, _ = ask_many(limited, tmp_path, 50)
        assert answers == 7
        assert len(server.bodies) == 7


def test_a_call_is_sent_only_if_the_most_it_may_cost_is_left(tmp_path: Path) -> None:
    # A call may cost 36 + 64 tokens of prompt and 100 of reply, and costs 10 + 5. The 14th call is
    # sent when 13 x 15 = 195 tokens are spent and 200 may follow. Then 210 + 200 would pass 400.
    with chat_server(says("x", delay_s=0.02)) as server:
        limited = config(server.url, budget={"tokens": 400})
        assert ask_many(limited, tmp_path, 50) == (14, Spending(calls=14, tokens=210, cost_nanos=0))
        assert len(server.bodies) == 14
        assert server.busiest <= 2


def test_money_is_counted_in_whole_billionths(tmp_path: Path) -> None:
    # A token of a prompt costs 1000 nanos and one of a reply 2000. A call costs 20 000 nanos, and
    # 300 000 at most. The 11th call is sent at 200 000. Then 220 000 + 300 000 would pass 500 000.
    with chat_server(says("x", delay_s=0.02)) as server:
        limited = config(server.url, budget={"money": 0.0005}, prices={"prompt": 1.0, "reply": 2.0})
        spent = Spending(calls=11, tokens=165, cost_nanos=220_000)
        assert ask_many(limited, tmp_path, 50) == (11, spent)
        assert len(server.bodies) == 11


def test_a_reply_without_token_counts_is_charged_at_its_upper_bound(tmp_path: Path) -> None:
    with chat_server(says("x", usage={"prompt_tokens": -1})) as server:
        spent = Spending(calls=1, tokens=200, cost_nanos=0)
        assert ask_many(config(server.url), tmp_path, 1) == (1, spent)


def test_reservations_are_charged_until_they_are_settled(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, BudgetConfig(tokens=100))
    first = ledger.reserve("a", Spending(calls=1, tokens=60, cost_nanos=6))
    with pytest.raises(BudgetExhausted, match="120 tokens would pass the limit of 100"):
        ledger.reserve("a", Spending(calls=1, tokens=60))
    reply = LedgerReply(digest="d", model="m", answer=ANSWER)
    ledger.settle(first, Spending(calls=1, tokens=10, cost_nanos=1), reply)
    second = ledger.reserve("b", Spending(calls=1, tokens=90, cost_nanos=9))
    ledger.settle(second, None)  # its cost is not known
    assert ledger.spent == Spending(calls=2, tokens=100, cost_nanos=10)
    ledger.close()

    again = Ledger(path, BudgetConfig())
    assert again.spent == Spending(calls=2, tokens=100, cost_nanos=10)
    assert again.find("d") == ANSWER
    assert again.find("e") is None
    again.close()


def test_files_that_are_no_ledger_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(RemoteError, match="not a ledger"):
        Ledger(path, BudgetConfig())
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 9")
        database.commit()
    with pytest.raises(RemoteError, match="has version 9, expected 1"):
        Ledger(path, BudgetConfig())


def test_a_ledger_that_is_open_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.engines.remote.ledger._LOCK_TIMEOUT_S", 0.05)
    path = tmp_path / "ledger.sqlite"
    with (
        closing(Ledger(path, BudgetConfig())),
        pytest.raises(RemoteError, match="is another process using it"),
    ):
        Ledger(path, BudgetConfig())


def eight_turns() -> list[Group]:
    return [group(trajectory(*(turn(index, "solver", f"{index}") for index in range(8))))]


def test_a_cancelled_run_leaves_a_complete_ledger(tmp_path: Path) -> None:
    def answer_four(_: dict[str, Any], number: int) -> Response:
        return says("PROCESS_SCORE: 4", delay_s=0.0 if number < 4 else 30)

    async def score_and_cancel(url: str) -> None:
        async with aclosing(Coach(config(url, concurrency=4), tmp_path)) as coach:
            scoring = asyncio.create_task(coach.score(eight_turns()))
            await asyncio.sleep(0.4)
            scoring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scoring

    with chat_server(answer_four) as server:
        asyncio.run(score_and_cancel(server.url))
        assert len(server.bodies) == 8

    assert [path.name for path in tmp_path.iterdir()] == ["ledger.sqlite"]
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        open_calls = database.execute("SELECT open, count(*) FROM calls GROUP BY open").fetchall()
        assert open_calls == [(0, 4), (1, 4)]
        assert database.execute("SELECT count(*) FROM replies").fetchone() == (4,)


def test_a_killed_run_has_its_replies_and_is_charged_for_calls_in_flight(tmp_path: Path) -> None:
    program = """
        import asyncio, sys
        from contextlib import aclosing
        from pathlib import Path
        from rollout.rewards.coach import Coach
        from tests.support.coached import config
        from tests.unit.engines.test_remote_ledger import eight_turns

        async def run():
            async with aclosing(Coach(config(sys.argv[1], concurrency=4), Path(sys.argv[2]))) as coach:
                await coach.score(eight_turns())

        asyncio.run(run())
    """

    def answer_four(_: dict[str, Any], number: int) -> Response:
        return says("PROCESS_SCORE: 4", delay_s=0.0 if number < 4 else 60)

    with chat_server(answer_four) as server:
        command = [sys.executable, "-c", textwrap.dedent(program), server.url, str(tmp_path)]
        child = subprocess.Popen(command, cwd=ROOT)
        deadline = time.monotonic() + 60
        while len(server.bodies) < 8 and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert len(server.bodies) == 8

    async def resume(url: str) -> tuple[list[float], dict[str, float]]:
        async with aclosing(Coach(config(url), tmp_path)) as coach:
            groups = await coach.score(eight_turns())
            turns = groups[0].trajectories[0].turns
            return [turn.scores["process"] for turn in turns], coach.metrics()

    with chat_server(says("PROCESS_SCORE: 6")) as server:
        scores, metrics = asyncio.run(resume(server.url))
    assert len(server.bodies) == 4
    assert sorted(scores) == [4.0] * 4 + [6.0] * 4
    assert metrics["coach/solver/cache_hits"] == 4.0
    assert metrics["coach/spent_calls"] == 12.0  # four answered, four killed, four of the new start
    # The killed calls are charged at their upper bounds, which include 2048 tokens of a reply.
    assert metrics["coach/spent_tokens"] > 8 * 15 + 4 * 2048
