"""What is written down of a collection: its journal, and quarantined trajectories.

The journal has replies, their tokens as they are sampled, and finished trajectories, from which it goes on after a
death. A quarantined trajectory has a file with what it was given and what the policies said, which plays it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import TypeAdapter
from pydantic_core import to_json

from rollout.base.errors import EngineError
from rollout.base.files import sha256, write_json, write_text
from rollout.base.ownership import FolderError, check_owner, epoch_of
from rollout.base.processes import say
from rollout.engines import ChatState, Heard, PolicyReply
from rollout.records.files import RecordError, read_trajectories, trajectory_of_row
from rollout.records.trajectory import (
    Completion,
    Group,
    Message,
    Sampling,
    Status,
    Task,
    Trajectory,
    changed,
    valid_text,
)
from rollout.teams.team import Team

Lineage = dict[int, str]  # by version of the weights, a digest of all that they were trained on

_BATCHES = "batches"
_REPLY, _COMPLETION = TypeAdapter(PolicyReply), TypeAdapter(Completion)


class CollectionJournal:
    """Lines of JSON, each behind its checksum; one that is torn or damaged is passed over.

    A line counts while the weights that sampled it, the newest of its versions, have the lineage that they had, and
    unless a later owner of the folder had written before it.
    """

    def __init__(self, path: Path, lineage: Lineage) -> None:
        """Read what is there; `lineage` grows as steps are trained."""
        self._path, self._lineage = path, lineage
        self._rows = {str(row["key"]): row for row in _rows(path)}
        self._file: IO[bytes] | None = None
        self._lines: list[bytes] = []  # that are not written yet
        self._broken = False

    @property
    def newest(self) -> int:
        """The newest version that sampled any of it; -1 where there is nothing."""
        return max((row["version"] for row in self._rows.values()), default=-1)

    def batches(self, played: Path) -> tuple[int, bool, dict[str, list[Trajectory]]]:
        """How many batches lie whole and rewarded in the file `played`, whether those are all, and theirs by task."""
        row, by_task = self.find(_BATCHES), dict[str, list[Trajectory]]()
        if row is None or not played.is_file() or sha256(played) != row["sha256"]:
            return 0, False, by_task
        for trajectory in read_trajectories(played):
            by_task.setdefault(trajectory.task_id, []).append(trajectory)
        return row["batches"], row["complete"], by_task

    def close(
        self, played: Path, batches: int, groups: Sequence[Group], *, complete: bool = False
    ) -> None:
        """The file `played` has so many batches, `groups` in all, in place of what is here."""
        self._lines.clear()
        newest = max((_newest(t) for group in groups for t in group.trajectories), default=0)
        row = self._row(_BATCHES, newest, batches=batches, complete=complete, sha256=sha256(played))
        if self._file is not None:
            self._file.close()
        self._rows, self._file = {_BATCHES: row}, None
        self._try(lambda: write_text(self._path, _line(row).decode()))

    def lineage_after(self, before: str) -> str:
        """The lineage of weights of lineage `before` that are trained on what has been closed."""
        return hashlib.sha256(f"{before} {self._rows[_BATCHES]['sha256']}".encode()).hexdigest()[
            :16
        ]

    def part(self, name: str) -> Recording:
        """What is played under a name, such as with another sampling, apart from what is not."""
        return Recording(self, name)

    def find(self, key: str) -> dict[str, Any] | None:
        """The row of a key, if it counts."""
        row = self._rows.get(key)
        return row if row is not None and row["of"] == self._lineage.get(row["version"]) else None

    def add(self, key: str, version: int, **values: Any) -> None:
        """Write a row down, with all that come before the event loop goes round: many replies end together."""
        self._try(lambda: self._append(_line(self._row(key, version, **values))))

    def flush(self) -> None:
        """Write now what has not been written yet."""
        self._try(self._write)

    def _row(self, key: str, version: int, **values: Any) -> dict[str, Any]:
        own = {"epoch": epoch_of(self._path), "of": self._lineage.get(version, "")}
        return {"key": key, "version": version, **own, **values}

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        if len(self._lines) > 1:
            return
        try:
            asyncio.get_running_loop().call_soon(self._try, self._write)
        except RuntimeError:  # there is none
            self._write()

    def _write(self) -> None:
        lines, self._lines = b"".join(self._lines), []
        if not lines:
            return
        check_owner(self._path)
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            lines = b"\n" + lines  # behind what a death has torn
        self._file.write(lines)

    def _try(self, write: Any) -> None:
        """Write, or say once that nothing is written any more: a journal never stops a run."""
        try:
            if not self._broken:
                write()
        except ValueError:
            pass  # a tool's answer that is no JSON: it is asked again after a death
        except (OSError, FolderError) as error:
            self._broken, why = True, getattr(error, "strerror", error)
            say(
                f"{self._path}: not written any more ({why}); a run that is killed now plays this step again"
            )


@dataclass(frozen=True, slots=True)
class Recording:
    """A journal's replies and finished trajectories of one kind of play."""

    journal: CollectionJournal
    name: str

    def trajectory(self, id: str) -> Trajectory | None:
        """A trajectory that has been completed."""
        row = self.journal.find(f"{self.name}trajectory {id}")
        if row is None:
            return None
        replies = {
            seed: self.journal.find(f"{self.name}reply {seed}") for seed in row.get("routed", ())
        }
        if None in replies.values():
            return None
        said = {
            seed: _REPLY.validate_python(reply["reply"]) for seed, reply in replies.items() if reply
        }
        played = trajectory_of_row(row["trajectory"])
        turns = (
            changed(t, routing=said[t.seed].completion.routing) if t.seed in said else t
            for t in played.turns
        )
        return replace(played, turns=tuple(turns))

    def keep(self, trajectory: Trajectory) -> None:
        """Write a trajectory down if it has been completed; what has failed may do better.

        Experts of its tokens are in its replies, and are not written again: they are most of what there is.
        """
        if trajectory.status is Status.COMPLETED:
            routed = [turn.seed for turn in trajectory.turns if turn.routing]
            if routed:
                trajectory = replace(
                    trajectory, turns=tuple(changed(t, routing=b"") for t in trajectory.turns)
                )
            own: dict[str, Any] = {"trajectory": trajectory} | (
                {"routed": routed} if routed else {}
            )
            self.journal.add(f"{self.name}trajectory {trajectory.id}", _newest(trajectory), **own)

    def answer(self, key: str) -> Any:
        """What a tool or verifier answered, as plain values."""
        row = self.journal.find(f"{self.name}call {key}")
        return row and row["answer"]

    def keep_answer(self, key: str, answer: object) -> None:
        """Write an answer down, before anything follows from it: a letter is not sent twice."""
        self.journal.add(
            f"{self.name}call {key}", 0, answer=answer
        )  # whatever weights come to ask the same
        self.journal.flush()

    def reply(self, seed: int, messages: Sequence[Message]) -> PolicyReply | None:
        """What was said to these messages at this place."""
        row = self.journal.find(f"{self.name}reply {seed}")
        return (
            _REPLY.validate_python(row["reply"])
            if row and row["asked"] == _asked(messages)
            else None
        )

    def keep_reply(self, seed: int, messages: Sequence[Message], reply: PolicyReply) -> None:
        """Write a reply down."""
        newest = max(span.version for span in reply.completion.versions)
        self.journal.add(f"{self.name}reply {seed}", newest, asked=_asked(messages), reply=reply)

    def part(self, seed: int, prompt_ids: Sequence[int]) -> tuple[str, Completion | None]:
        """What had been sampled behind a prompt by the call with this seed, and where it goes on."""
        found, place = None, f"{self.name}part {seed} {hash(tuple(prompt_ids))}"
        while row := self.journal.find(place):
            more = _COMPLETION.validate_python(row["part"])
            found, place = found.then(more) if found else more, _behind(place, more)
        return place, found

    def keep_part(self, place: str, part: Completion) -> str:
        """Write down what has been sampled at a place; where it goes on."""
        self.journal.add(place, part.versions[-1].version, part=part)
        return _behind(place, part)


def _behind(place: str, part: Completion) -> str:
    said, _, before = place.rpartition(" ")
    return f"{said} {hash((int(before), part.token_ids))}"  # of integers, the same in every process


def _newest(trajectory: Trajectory) -> int:
    """The newest version that sampled any of it."""
    return max((turn.policy_version for turn in trajectory.turns), default=0)


def _asked(messages: Sequence[Message]) -> str:
    return hashlib.blake2b(to_json(list(messages)), digest_size=8).hexdigest()


def _json(record: object, bytes_mode: Literal["utf8", "base64"] = "base64") -> bytes:
    return to_json(
        record, inf_nan_mode="constants", bytes_mode=bytes_mode
    )  # many times faster than json on records


def _line(row: Mapping[str, Any]) -> bytes:
    text = _json(
        row, "utf8" if "answer" in row else "base64"
    )  # a tool's bytes are text, those of a reply numbers
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    latest = 0
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        checksum, _, text = line.partition(b" ")
        if text and checksum == b"%08x" % zlib.crc32(text):
            row = json.loads(text)
            if row.get("epoch", 0) >= latest:
                latest = row.get("epoch", 0)
                yield row


@dataclass(frozen=True, slots=True)
class _Replay:
    """A policy that says what it said before."""

    said: Mapping[int, PolicyReply]

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        if sampling.seed not in self.said:
            raise EngineError(
                "the recording ends here: the orchestra asks for a reply that was never given"
            )
        return self.said[sampling.seed]


def write_quarantined(
    folder: Path, trajectory: Trajectory, task: Task, seed: int, heard: Heard, error: BaseException
) -> Path:
    """Write what a quarantined trajectory was given and what it came to; where the file is.

    A file of the same trajectory, from before a run was resumed, is replaced.
    """
    name = (
        re.sub(r"[^A-Za-z0-9._-]", "_", f"{trajectory.step}-{task.id}"[:100])
        + f"-{trajectory.sample}.json"
    )
    trace = "".join(traceback.format_exception(error))
    value = {
        "trajectory": trajectory.id,
        "error": trajectory.error,
        "traceback": [valid_text(line) for line in trace.splitlines()],
        "task": asdict(task),
        "seed": seed,
        "step": trajectory.step,
        "sample": trajectory.sample,
        "replies": [
            {
                "seed": own,
                "messages": [asdict(message) for message in messages],
                **json.loads(_json(reply)),
            }
            for own, (messages, reply) in heard.items()
        ],
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(folder / name, value)
    return folder / name


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A quarantined trajectory, as its file has it."""

    trajectory: str
    error: str
    task: Task
    seed: int
    step: int
    sample: int
    said: Mapping[int, PolicyReply]  # by the call's seed

    @classmethod
    def read(cls, path: Path) -> Quarantined:
        """The trajectory in a file of `write_quarantined`; RecordError if it is not such a file."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            task = Task(**{**value["task"], "answers": tuple(value["task"]["answers"])})
            said = {reply.pop("seed"): _REPLY.validate_python(reply) for reply in value["replies"]}
            fields = {
                name: value[name] for name in ("trajectory", "error", "seed", "step", "sample")
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RecordError(
                f"{path}: not a quarantined trajectory ({type(error).__name__}: {error}); expected a file of "
                "results/<run>/train/quarantine"
            ) from error
        return cls(task=task, said=said, **fields)

    def team(self, team: Team) -> Team:
        """The team with recordings in place of its policies."""
        policies = {agent.policy for agent in team.agents.values()}
        return replace(team, players=dict.fromkeys(policies, _Replay(self.said)))
