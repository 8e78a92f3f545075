"""Quarantined trajectories: what they were given and what the policies said, in a file that plays them again."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mcore_mas.rollout.base.errors import EngineError
from mcore_mas.rollout.base.files import write_json
from mcore_mas.rollout.engines import ChatState, Heard, PolicyReply
from mcore_mas.rollout.records.files import RecordError
from mcore_mas.rollout.records.trajectory import Message, Sampling, Task, Trajectory, valid_text
from mcore_mas.rollout.teams.team import Team


@dataclass(frozen=True, slots=True)
class _Recording:
    """A policy that says what it said before."""

    said: Mapping[int, PolicyReply]

    async def say(self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None) -> PolicyReply:
        if sampling.seed not in self.said:
            raise EngineError("the recording ends here: the orchestra asks for a reply that was never given")
        return self.said[sampling.seed]


def write_quarantined(
    folder: Path, trajectory: Trajectory, task: Task, seed: int, heard: Heard, error: BaseException
) -> Path:
    """Write what a quarantined trajectory was given and what it came to; where the file is.

    A file of the same trajectory, from before a run was resumed, is replaced.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{trajectory.step}-{task.id}"[:100]) + f"-{trajectory.sample}.json"
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
            {"seed": own, "messages": [asdict(message) for message in messages], **asdict(reply)}
            for own, (messages, reply) in heard.items()
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
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
        """The trajectory in a file of `write_quarantined`.

        Raises:
            RecordError: it is not such a file.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            task = Task(**{**value["task"], "answers": tuple(value["task"]["answers"])})
            said = {reply.pop("seed"): reply_of_row(reply) for reply in value["replies"]}
            fields = {name: value[name] for name in ("trajectory", "error", "seed", "step", "sample")}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RecordError(
                f"{path}: not a quarantined trajectory ({type(error).__name__}: {error}); expected a file of "
                "results/<run>/train/quarantine"
            ) from error
        return cls(task=task, said=said, **fields)

    def team(self, team: Team) -> Team:
        """The team with recordings in place of its policies."""
        policies = {agent.policy for agent in team.agents.values()}
        return replace(team, players=dict.fromkeys(policies, _Recording(self.said)))


_REPLY = TypeAdapter(PolicyReply)


def reply_of_row(row: Mapping[str, Any]) -> PolicyReply:
    """A reply from its fields as plain values.

    Raises:
        ValidationError: they are not those of one.
    """
    return _REPLY.validate_python(row)
