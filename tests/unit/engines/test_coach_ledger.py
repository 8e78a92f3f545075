"""Budgets hold exactly, whoever asks at once, and what was paid for survives a kill."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from rollout.engines.remote import Answer, BudgetConfig, RemoteError, ReplySettings
from rollout.engines.remote.caller import Caller, Tally
from rollout.engines.remote.ledger import BudgetExhausted, Ledger, Spending
from rollout.records.trajectory import Message
from rollout.rewards.coach import Coach
from tests.support.chat_server import chat_server, says
from tests.support.coached import config, group, trajectory, turn

ROOT = Path(__file__).resolve().parents[3]
ANSWER = Answer(text="hi", finish_reason="stop", prompt_tokens=1, completion_tokens=2)


def ask_many(coach_config, folder, count):
    """`count` different prompts of 36 bytes at once: how many were answered, and what was charged in all."""

    async def run():
        caller = Caller(coach_config, folder)
        asks = (
            caller.ask(
                "a",
                [Message(role="user", content=f"{i:036d}")],
                ReplySettings(max_tokens=100),
                Tally(),
            )
            for i in range(count)
        )
        found = await asyncio.gather(*asks, return_exceptions=True)
        spent = caller.spent
        await caller.aclose()
        assert all(isinstance(f, Answer | BudgetExhausted) for f in found)
        return sum(isinstance(f, Answer) for f in found), spent

    return asyncio.run(run())


def test_calls_are_never_more_than_allowed(tmp_path) -> None:
    with chat_server(says("x", delay_s=0.02)) as server:
        limited = config(server.url, budget={"calls": 7})
        assert ask_many(limited, tmp_path, 50) == (7, Spending(calls=7, tokens=105, nanos=0))
        assert len(server.bodies) == 7
        assert (
            ask_many(limited, tmp_path, 50)[0] == 7
        )  # those that are kept; the next start may send none
        assert len(server.bodies) == 7


def test_a_call_is_sent_only_if_the_most_it_may_cost_is_left(tmp_path) -> None:
    # at most 36 + 64 tokens of prompt and 100 of reply; in fact 10 + 5. The 14th call is sent when 13 x 15 = 195 are
    # spent and 200 may follow; then 210 + 200 would pass 400.
    with chat_server(says("x", delay_s=0.02)) as server:
        limited = config(server.url, budget={"tokens": 400})
        assert ask_many(limited, tmp_path, 50) == (14, Spending(calls=14, tokens=210, nanos=0))
        assert len(server.bodies) == 14
        assert server.busiest <= 2


def test_money_is_counted_in_whole_billionths(tmp_path) -> None:
    # a token of prompt is 1000 nanos, one of reply 2000: 20 000 in fact, 300 000 at most. The 11th call is sent at
    # 200 000 spent; then 220 000 + 300 000 would pass 500 000.
    with chat_server(says("x", delay_s=0.02)) as server:
        limited = config(server.url, budget={"money": 0.0005}, prices={"prompt": 1.0, "reply": 2.0})
        assert ask_many(limited, tmp_path, 50) == (
            11,
            Spending(calls=11, tokens=165, nanos=220_000),
        )
        assert len(server.bodies) == 11


def test_a_reply_without_counts_is_charged_at_the_most_it_may_have_cost(tmp_path) -> None:
    with chat_server(says("x", usage={"prompt_tokens": -1})) as server:
        assert ask_many(config(server.url), tmp_path, 1) == (
            1,
            Spending(calls=1, tokens=200, nanos=0),
        )


def test_the_ledger_by_hand(tmp_path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, BudgetConfig(tokens=100))
    first = ledger.reserve("a", Spending(calls=1, tokens=60, nanos=6))
    with pytest.raises(BudgetExhausted, match="120 tokens would pass the limit of 100"):
        ledger.reserve("a", Spending(calls=1, tokens=60))
    ledger.settle(first, Spending(calls=1, tokens=10, nanos=1), ("d", "m", ANSWER))
    second = ledger.reserve("b", Spending(calls=1, tokens=90, nanos=9))
    ledger.settle(second, None)  # its end is not known
    assert ledger.spent == Spending(calls=2, tokens=100, nanos=10)
    ledger.close()
    again = Ledger(path, BudgetConfig())
    assert again.spent == Spending(calls=2, tokens=100, nanos=10)
    assert (again.find("d"), again.find("e")) == (ANSWER, None)
    again.close()


def test_what_is_no_ledger_is_named(tmp_path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(RemoteError, match="no ledger"):
        Ledger(path, BudgetConfig())
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(RemoteError, match="has version 9, expected 1"):
        Ledger(path, BudgetConfig())


def test_a_cancelled_run_leaves_a_whole_ledger(tmp_path) -> None:
    played = [group(trajectory(*(turn(i, "solver", f"{i}") for i in range(8))))]

    async def run(url):
        async with aclosing(Coach(config(url, concurrency=4), tmp_path)) as coach:
            scoring = asyncio.create_task(coach.score(played))
            await asyncio.sleep(0.4)
            scoring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scoring

    with chat_server(lambda _, n: says("PROCESS_SCORE: 4", delay_s=0.0 if n < 4 else 30)) as server:
        asyncio.run(run(server.url))
        sent = len(server.bodies)
    assert sent == 8
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.sqlite"]
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert db.execute("SELECT open, count(*) FROM calls GROUP BY open").fetchall() == [
        (0, 4),
        (1, 4),
    ]
    assert db.execute("SELECT count(*) FROM replies").fetchone() == (4,)
    db.close()


def test_a_killed_run_has_kept_its_replies_and_owes_what_was_in_flight(tmp_path) -> None:
    code = """
        import asyncio, sys
        from contextlib import aclosing
        from pathlib import Path
        from rollout.rewards.coach import Coach
        from tests.support.coached import config, group, trajectory, turn

        played = [group(trajectory(*(turn(i, "solver", f"{i}") for i in range(8))))]

        async def run():
            async with aclosing(Coach(config(sys.argv[1], concurrency=4), Path(sys.argv[2]))) as coach:
                await coach.score(played)

        asyncio.run(run())
    """
    with chat_server(lambda _, n: says("PROCESS_SCORE: 4", delay_s=0.0 if n < 4 else 60)) as server:
        command = [sys.executable, "-c", textwrap.dedent(code), server.url, str(tmp_path)]
        child = subprocess.Popen(command, cwd=ROOT)
        until = time.monotonic() + 60
        while len(server.bodies) < 8 and time.monotonic() < until:
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert len(server.bodies) == 8
    played = [group(trajectory(*(turn(i, "solver", f"{i}") for i in range(8))))]

    async def resume(url):
        async with aclosing(Coach(config(url), tmp_path)) as coach:
            groups = await coach.score(played)
            return [t.scores["process"] for t in groups[0].trajectories[0].turns], coach.metrics()

    with chat_server(says("PROCESS_SCORE: 6")) as server:
        scores, metrics = asyncio.run(resume(server.url))
    assert len(server.bodies) == 4
    assert sorted(scores) == [4.0] * 4 + [6.0] * 4
    assert metrics["coach/solver/cache_hits"] == 4.0
    assert metrics["coach/spent_calls"] == 12.0  # 4 + 4 that were killed + 4
    assert (
        metrics["coach/spent_tokens"] > 8 * 15 + 4 * 1024
    )  # the killed ones at the most they may have cost
