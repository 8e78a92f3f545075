"""Ledger of a frozen model: replies and spending in one SQLite file, which a killed run neither loses nor pays twice.

What a call may cost at most is written down before it is sent, and what it did cost, with the reply, in one transaction
after it. A call whose end is not known (killed, cancelled, timed out) stays charged at the most it may have cost.
"""

from __future__ import annotations

import operator
import sqlite3
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path

from rollout.base.errors import Unusable
from rollout.engines.remote import Answer, BudgetConfig, RemoteError

LEDGER_VERSION = 1
LEDGER_SCHEMA = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")


class BudgetExhausted(Unusable):
    """The next call might cost more than is left; nothing was sent."""


@dataclass(frozen=True, slots=True)
class Spending:
    """What calls cost, or may cost at most."""

    calls: int = 0
    tokens: int = 0  # of prompts and replies
    nanos: int = 0  # 1e-9 units of the currency the prices are in

    def __add__(self, other: Spending) -> Spending:
        return Spending(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Spending) -> Spending:
        return Spending(*map(operator.sub, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Reservation:
    """A call that may be sent: `worst` is charged until it is settled."""

    id: int
    worst: Spending


Kept = tuple[
    str, str, Answer
]  # a reply to be found again: digest of everything that decided it, its model, itself


class Ledger:
    """One owner's replies and spending. `in_flight` counts reservations of this process that are not settled."""

    def __init__(self, path: Path, budget: BudgetConfig) -> None:
        """Open or make the file; RemoteError if another process has it open, or it is no ledger."""
        self._budget = budget
        self.in_flight = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, timeout=2.0, isolation_level=None)
        with ExitStack() as failed:
            failed.callback(self._db.close)
            try:
                self.spent = self._prepare(path)
            except sqlite3.OperationalError as error:
                raise RemoteError(
                    f"{path}: cannot be opened ({error}); is another process using it?"
                ) from error
            except sqlite3.DatabaseError as error:
                why = f"no ledger ({error}); move it away, knowing that it said what was spent"
                raise RemoteError(f"{path}: {why}") from error
            failed.pop_all()

    def _prepare(self, path: Path) -> Spending:
        """Take the file, make its tables if it is new, and add up what was spent."""
        self._db.execute(
            "PRAGMA locking_mode = EXCLUSIVE"
        )  # one owner, and no shared memory on network disks
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, LEDGER_VERSION):
                raise RemoteError(
                    f"{path}: has version {version}, expected {LEDGER_VERSION}; move it away to start a new one"
                )
            if version == 0:
                for statement in LEDGER_SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {LEDGER_VERSION}")
            spent = "SELECT count(*), coalesce(sum(tokens), 0), coalesce(sum(nanos), 0) FROM calls"
            return Spending(*self._db.execute(spent).fetchone())

    def find(self, digest: str) -> Answer | None:
        """The reply to an earlier call, None if there is none."""
        row = self._db.execute(
            "SELECT text, finish_reason, prompt_tokens, completion_tokens FROM replies WHERE digest = ?",
            (digest,),
        ).fetchone()
        return row and Answer(
            text=row[0], finish_reason=row[1], prompt_tokens=row[2], completion_tokens=row[3]
        )

    def reserve(self, agent: str, worst: Spending) -> Reservation:
        """Charge what a call may cost at most, before it is sent; BudgetExhausted if that might pass a limit."""
        passed = self._refused(self.spent + worst)
        if passed:
            raise BudgetExhausted(passed)
        row = self._db.execute(
            "INSERT INTO calls (agent, open, tokens, nanos) VALUES (?, 1, ?, ?)",
            (agent, worst.tokens, worst.nanos),
        )
        self.spent += worst
        self.in_flight += 1
        return Reservation(int(row.lastrowid or 0), worst)

    def _refused(self, total: Spending) -> str:
        """Which limit `total` would pass, in words; "" if none."""
        budget = self._budget
        nanos = None if budget.money is None else round(budget.money * 1e9)
        for what, limit, value, unit in (
            ("calls", budget.calls, total.calls, 1),
            ("tokens", budget.tokens, total.tokens, 1),
            ("money", nanos, total.nanos, 1e9),
        ):
            if limit is not None and value > limit:
                return f"{value / unit:g} {what} would pass the limit of {limit / unit:g}"
        return ""

    def settle(
        self, reservation: Reservation, cost: Spending | None, kept: Kept | None = None
    ) -> None:
        """Charge `cost` instead; None: it is not known, and the most it may have cost stays. Keep the reply, if any."""
        with self._db:  # commits, or rolls back
            self._db.execute("BEGIN IMMEDIATE")
            if cost is not None:
                self._db.execute(
                    "UPDATE calls SET open = 0, tokens = ?, nanos = ? WHERE id = ?",
                    (cost.tokens, cost.nanos, reservation.id),
                )
            if kept is not None:
                digest, model, answer = kept
                row = (digest, model, *astuple(answer))
                self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?)", row)
        self.in_flight -= 1
        if cost is not None:
            self.spent += cost - reservation.worst

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._db.close()
