"""Quarantined trajectories: files from which a trajectory that failed by a defect is played again."""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter
from pydantic_core import to_json

from rollout.base.errors import EngineError
from rollout.base.json_files import read_json, write_json
from rollout.base.text import valid_text
from rollout.engines import ChatState, PolicyReply
from rollout.records.files import RecordError
from rollout.records.trajectory import Message, Sampling, Task, Trajectory
from rollout.teams.team import RecordedReply, Team

_REPLY = TypeAdapter(PolicyReply)
_MAX_TASK_NAME_CHARS = 100  # characters of a task's id that a file's name has


def quarantine_path(folder: Path, step: int, task_id: str, sample: int) -> Path:
    """Return the path of a quarantined trajectory's file in `folder`.

    The name has the first 100 characters of the task's id, in which characters other than letters,
    digits, `.`, `_` and `-` are replaced by `_`. If the id differs from that, its digest is added, so
    that no two tasks have the same file.
    """
    task_name = re.sub(r"[^A-Za-z0-9._-]", "_", task_id[:_MAX_TASK_NAME_CHARS])
    if task_name != task_id:
        digest = hashlib.sha256(task_id.encode(errors="surrogatepass")).hexdigest()
        task_name = f"{task_name}-{digest[:12]}"
    return folder / f"{step}-{task_name}-{sample}.json"


def write_quarantined(
    folder: Path,
    trajectory: Trajectory,
    *,
    task: Task,
    seed: int,
    replies: Mapping[int, RecordedReply],
    error: BaseException,
) -> Path:
    """Write a trajectory that failed by a defect in its code, so that it can be played again.

    A file of the same trajectory, from before the run was resumed, is replaced.

    Args:
        seed: seed of the run.
        replies: every reply that the trajectory's policies gave, by the seed of the call.
        error: the defect.

    Returns:
        The path of the file.
    """
    path = quarantine_path(folder, trajectory.step, task.id, trajectory.sample)
    lines = "".join(traceback.format_exception(error)).splitlines()
    value = {
        "trajectory": trajectory.id,
        "error": trajectory.error,
        "traceback": [valid_text(line) for line in lines],
        "task": asdict(task),
        "seed": seed,
        "step": trajectory.step,
        "sample": trajectory.sample,
        "replies": [_reply_row(call_seed, recorded) for call_seed, recorded in replies.items()],
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(path, value)
    return path


def _reply_row(call_seed: int, recorded: RecordedReply) -> dict[str, object]:
    """Return a reply as JSON values, with the seed of its call and the messages that it answers."""
    reply = to_json(recorded.reply, inf_nan_mode="constants", bytes_mode="base64")
    messages = [asdict(message) for message in recorded.messages]
    return {"seed": call_seed, "messages": messages, **json.loads(reply)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """Contents of a quarantined trajectory's file."""

    trajectory: str  # id
    error: str
    task: Task
    seed: int  # of the run
    step: int
    sample: int
    replies: Mapping[int, PolicyReply]  # by the seed of the call

    @classmethod
    def read(cls, path: Path) -> Quarantined:
        """Read a file that `write_quarantined` wrote.

        The traceback and the messages that were answered are in the file for people, and are left out.

        Raises:
            RecordError: the file is missing, or `write_quarantined` did not write it.
        """
        try:
            value = read_json(path)
            task_fields = value["task"]
            task_fields["answers"] = tuple(task_fields["answers"])
            replies = {}
            for row in value["replies"]:
                call_seed = row.pop("seed")
                replies[call_seed] = _REPLY.validate_python(row)
            return cls(
                trajectory=value["trajectory"],
                error=value["error"],
                task=Task(**task_fields),
                seed=value["seed"],
                step=value["step"],
                sample=value["sample"],
                replies=replies,
            )
        except FileNotFoundError as error:
            raise RecordError(
                f"{path}: no such file; expected a file of results/<run>/train/quarantine"
            ) from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RecordError(
                f"{path}: not a quarantined trajectory ({type(error).__name__}: {error}); "
                "expected a file of results/<run>/train/quarantine"
            ) from error

    def team(self, team: Team) -> Team:
        """Return the team with policies that give the recorded replies."""
        policies = {agent.policy for agent in team.agents.values()}
        return replace(team, policies=dict.fromkeys(policies, _RecordedPolicy(self.replies)))


@dataclass(frozen=True, slots=True)
class _RecordedPolicy:
    """A policy that repeats recorded replies."""

    replies: Mapping[int, PolicyReply]  # by the seed of the call

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        if sampling.seed not in self.replies:
            raise EngineError(
                "the recording ends here: the orchestra asks for a reply that was never given"
            )
        return self.replies[sampling.seed]
