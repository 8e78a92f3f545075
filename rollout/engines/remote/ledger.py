"""Ledger of a frozen model: replies and spending in a SQLite file, which survive a killed run.

An upper bound of a call's cost is recorded before the call is sent. After the call, its cost and its
reply are recorded in one transaction. A call that did not end (killed, cancelled or timed out)
remains charged at the upper bound.
"""

from __future__ import annotations

import sqlite3
from dataclasses import astuple, dataclass
from pathlib import Path

from rollout.base.errors import Unusable
from rollout.engines.remote.config import BudgetConfig
from rollout.engines.remote.errors import RemoteError
from rollout.engines.remote.protocol import Answer

_VERSION = 1  # version of the tables
_SCHEMA = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
_LOCK_TIMEOUT_S = 2.0
_NANOS = 1e9  # units of 1e-9 in one unit of the currency


class BudgetExhausted(Unusable):
    """The next call may exceed the budget; it was not sent."""


@dataclass(frozen=True, slots=True)
class Spending:
    """Cost of calls, or an upper bound of it.

    Attributes:
        calls: number of requests.
        tokens: tokens of prompts and replies.
        cost_nanos: money in 1e-9 units of the currency of the prices.
    """

    calls: int = 0
    tokens: int = 0
    cost_nanos: int = 0

    def __add__(self, other: Spending) -> Spending:
        return Spending(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            cost_nanos=self.cost_nanos + other.cost_nanos,
        )

    def __sub__(self, other: Spending) -> Spending:
        return Spending(
            calls=self.calls - other.calls,
            tokens=self.tokens - other.tokens,
            cost_nanos=self.cost_nanos - other.cost_nanos,
        )


@dataclass(frozen=True, slots=True)
class Reservation:
    """A call that may be sent; `max_cost` is charged until it is settled."""

    id: int
    max_cost: Spending


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReply:
    """Reply that later calls with the same digest get.

    Attributes:
        digest: SHA-256 of everything that decides the reply.
        model: name of the model.
    """

    digest: str
    model: str
    answer: Answer


class Ledger:
    """Replies and spending of a frozen model, in a file that one process at a time can open.

    Attributes:
        spent: spending over all starts, with the upper bounds of calls that are not settled.
        in_flight: number of reservations of this process that are not settled.
    """

    def __init__(self, path: Path, budget: BudgetConfig) -> None:
        """Open the file, or create it.

        Raises:
            RemoteError: another process has opened it, or it is not a ledger.
        """
        self._budget = budget
        self.in_flight = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
        try:
            self._lock()
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._create_tables(path)
                self.spent = self._read_spending()
        except sqlite3.OperationalError as error:
            self._database.close()
            raise RemoteError(
                f"{path}: cannot be opened ({error}); is another process using it?"
            ) from error
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise RemoteError(
                f"{path}: not a ledger ({error}); if you move it away, the spending that it recorded is "
                "forgotten, and the budget starts again"
            ) from error
        except BaseException:
            self._database.close()
            raise

    def _lock(self) -> None:
        # With an exclusive lock, SQLite needs no shared memory, which network file systems lack.
        self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")

    def _create_tables(self, path: Path) -> None:
        """Create the tables of a new file; raise RemoteError if an existing file is of another version."""
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version == _VERSION:
            return
        if version != 0:
            raise RemoteError(
                f"{path}: has version {version}, expected {_VERSION}; move it away to start a new "
                "one"
            )
        for statement in _SCHEMA.split(";"):
            self._database.execute(statement)
        self._database.execute(f"PRAGMA user_version = {_VERSION}")

    def _read_spending(self) -> Spending:
        query = "SELECT count(*), coalesce(sum(tokens), 0), coalesce(sum(nanos), 0) FROM calls"
        calls, tokens, nanos = self._database.execute(query).fetchone()
        return Spending(calls=calls, tokens=tokens, cost_nanos=nanos)

    def find(self, digest: str) -> Answer | None:
        """Return the recorded reply with this digest, or None."""
        query = (
            "SELECT text, finish_reason, prompt_tokens, completion_tokens "
            "FROM replies WHERE digest = ?"
        )
        row = self._database.execute(query, (digest,)).fetchone()
        if row is None:
            return None
        text, finish_reason, prompt_tokens, completion_tokens = row
        return Answer(
            text=text,
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )

    def reserve(self, agent: str, max_cost: Spending) -> Reservation:
        """Charge the upper bound of a call's cost, before the call is sent.

        Raises:
            BudgetExhausted: the call may exceed a limit.
        """
        problem = self._budget_error(self.spent + max_cost)
        if problem:
            raise BudgetExhausted(problem)
        cursor = self._database.execute(
            "INSERT INTO calls (agent, open, tokens, nanos) VALUES (?, 1, ?, ?)",
            (agent, max_cost.tokens, max_cost.cost_nanos),
        )
        self.spent += max_cost
        self.in_flight += 1
        return Reservation(int(cursor.lastrowid or 0), max_cost)

    def _budget_error(self, total: Spending) -> str:
        """Return the first limit that a total exceeds, as a message, or ""."""
        budget = self._budget
        if budget.calls is not None and total.calls > budget.calls:
            return f"{total.calls:g} calls would pass the limit of {budget.calls:g}"
        if budget.tokens is not None and total.tokens > budget.tokens:
            return f"{total.tokens:g} tokens would pass the limit of {budget.tokens:g}"
        if budget.money is not None:
            limit = round(budget.money * _NANOS)
            if total.cost_nanos > limit:
                money = total.cost_nanos / _NANOS
                return f"a cost of {money:g} would pass the limit of {limit / _NANOS:g}"
        return ""

    def settle(
        self,
        reservation: Reservation,
        cost: Spending | None,
        reply: LedgerReply | None = None,
    ) -> None:
        """Charge the cost of a call in place of its upper bound, and record its reply.

        Args:
            cost: cost of the call; None: it is not known, and the upper bound remains charged.
            reply: reply to record; None: there is none.
        """
        with self._database:  # commits, or rolls back
            self._database.execute("BEGIN IMMEDIATE")
            if cost is not None:
                self._database.execute(
                    "UPDATE calls SET open = 0, tokens = ?, nanos = ? WHERE id = ?",
                    (cost.tokens, cost.cost_nanos, reservation.id),
                )
            if reply is not None:
                row = (reply.digest, reply.model, *astuple(reply.answer))
                self._database.execute(
                    "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?)", row
                )
        self.in_flight -= 1
        if cost is not None:
            self.spent += cost - reservation.max_cost

    def close(self) -> None:
        """Close the file; a second call has no effect."""
        self._database.close()
