"""Records of rollouts: tasks, completions, turns, trajectories and groups, with seeds and Arrow schemas.

Records are frozen, and their texts are valid Unicode: what others wrote is cleaned on its way in. Tokens are written
once, by the engine that sampled them, and never re-tokenised. Every row carries every id, so any grouping is one key
function over a row (see `mcore_mas.credit.samples`).
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.base.text import clean_fields

_COUNTED = ("overlong", "undecided", "quarantined")  # why a trajectory failed, as its metrics name it


class RecordError(ValueError):
    """A file of records cannot be read: says which file, what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem for a team."""

    id: str
    prompt: str
    answers: tuple[str, ...]  # every accepted ground truth
    env: str  # name in ENVS
    source: str  # data source, the unit in which results are reported
    split: str  # train | validation | test

    def __post_init__(self) -> None:
        clean_fields(self, "id", "prompt", "answers", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A tool call as an assistant asks for it."""

    id: str  # by which its result says what it answers
    name: str
    arguments: str  # a JSON object

    def __post_init__(self) -> None:
        clean_fields(self, "id", "name", "arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message.

    Of a reply that was sampled here `raw` is the text as it was sampled, where that is more than `content`: with
    thoughts and tool calls in the model's own words. A chat template is given `raw`, never what was read out of it.
    """

    role: str  # system | user | assistant | tool
    content: str
    reasoning: str = ""  # an assistant's thoughts
    calls: tuple[ToolUse, ...] = ()  # an assistant's
    answers: str = ""  # id of the call whose result a tool's message is
    raw: str = ""

    def __post_init__(self) -> None:
        clean_fields(self, "content", "reasoning", "raw")

    @property
    def text(self) -> str:
        """All that was said."""
        return self.raw or self.content


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation in which an agent replies as it should: material for a cold start."""

    agent: str
    messages: tuple[Message, ...]  # the loss is on the assistant's messages


def derive_seed(*place: int | str) -> int:
    """A 64-bit seed for one place in a run, for example (run seed, step, task, sample, agent, turn).

    Every random choice is a hash of where it happens. There is no generator state to save or restore: the same place
    gives the same seed after any restart.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in place)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is sampled."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    max_tokens: int = 512  # completion tokens, the stop token included
    stop: tuple[int, ...] = ()  # token ids that end a completion
    seed: int = 0  # 64-bit; equal seed, prompt and weights give equal tokens, where the engine can promise it
    session: str = field(default="", compare=False)  # requests of one session find each other's cached prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Completion tokens [start, end) that were sampled by one version of the weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one prompt."""

    token_ids: tuple[int, ...]  # [C], the stop token included
    logprobs: tuple[float, ...]  # [C] natural log of the full distribution after temperature
    finish_reason: str  # stop | length | abort
    versions: tuple[VersionSpan, ...]
    cached_tokens: int = 0  # prompt tokens whose keys and values were reused


class Status(enum.StrEnum):
    """How a trajectory ended; only COMPLETED trajectories may train or count as evidence."""

    COMPLETED = "completed"
    FAILED = "failed"  # an engine, tool or environment failed: masked, never a zero reward
    LATE = "late"  # a call, a tool or the whole took longer than it may
    ABORTED = "aborted"  # given up: its batch was late, or its group was full without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One LLM call of one agent.

    Names in `scores`, absent where not measured: `team` is what the environment gave in the step that followed, beside
    that step's metrics; `penalty` is what penalties added to its reward; `local` is what the orchestra gave to this
    turn, with `undecided` in its place when nobody can say; `branch` is what a tree chose by; `cut` is 1 where the
    prompt was too long and part of it was left out. Of chats: `tool_calls` and `malformed_calls` in the reply;
    `root` is 1 where the chat's tokens begin anew, because its template rewrote what came before or it was made
    shorter; `folded`, `dropped_results` and `full` say what became of it when it was full. `unread` is 1 where an
    agent program did not wait for the reply.
    """

    index: int  # position in the trajectory, from 0
    round: int = 0  # which step of the environment followed, from 0; turns before one step share it
    agent: str
    policy: str
    policy_version: int  # version of the weights that sampled the completion's end
    versions: tuple[VersionSpan, ...] = ()  # which of them sampled which tokens; (): `policy_version` all
    node: str  # branch numbers from the root, as "0.2.1"; "" outside tree sampling
    state_key: str  # digest of what the agent saw
    anchor: str = ""  # digest of the environment's state without history; "" where it names none
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]  # [P]
    completion_ids: tuple[int, ...]  # [C], the stop token included
    logprobs: tuple[float, ...]  # [C] natural log, after temperature
    temperature: float
    text: str  # decoded completion without special tokens
    finish_reason: str  # stop | length | abort
    valid: bool  # the role's parser accepted the text
    seed: int  # of this call's sampling stream
    scores: Mapping[str, float] = field(default_factory=dict)  # what was measured of this turn, by name
    reward: float | None = None  # set by a reward allocator
    chat: str = ""  # which chat of its agent it belongs to, as "coder/0"; "" for one that was asked once
    masked: bool = False  # does not train; its reward is None where nothing can be said of it, and counts for its peers
    started_s: float = field(default=0.0, compare=False)  # Unix time
    took_s: float = field(default=0.0, compare=False)  # until the reply was there, waiting for a slot included

    def __post_init__(self) -> None:
        clean_fields(self, "text")

    @property
    def news(self) -> tuple[Message, ...]:
        """What the agent had not seen before: of a chat the messages since its latest reply, else all."""
        replies = [i for i, message in enumerate(self.messages) if message.role == "assistant"]
        return self.messages[replies[-1] + 1 :] if replies else self.messages

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled its tokens."""
        return min((span.version for span in self.versions), default=self.policy_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEvent:
    """One tool call made by the environment on behalf of an agent."""

    after_turn: int  # index of the turn that caused it
    node: str = ""  # that turn's node
    tool: str
    query: str
    result: str
    failed: bool = False  # through the agent's own fault
    started_s: float = field(default=0.0, compare=False)  # Unix time
    took_s: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        clean_fields(self, "tool", "query", "result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """All turns of a team on one task, in order; with tree sampling also those of the branches that did not go on."""

    id: str
    task_id: str
    source: str
    sample: int  # which of the task's group members, from 0
    step: int  # training step, -1 in evaluation
    turns: tuple[Turn, ...]
    tools: tuple[ToolEvent, ...] = ()
    outcome: float | None = None  # the environment's score of the whole trajectory
    answer: str | None = None  # the final answer, equal ones written equally; "": none given, None: not reported
    leaf: str = ""  # node of the branch that went on to the end, "" outside tree sampling
    metrics: Mapping[str, float] = field(default_factory=dict)
    status: Status = Status.COMPLETED
    error: str = ""  # why status is not COMPLETED

    def __post_init__(self) -> None:
        clean_fields(self, "answer", "error")

    @property
    def success(self) -> float:
        """What evaluation counts: the metric `solved` where the environment measures it, else the outcome."""
        return self.metrics.get("solved", self.outcome or 0.0)

    @property
    def score(self) -> float | None:
        """`success`; 0 where a prompt was too long, the team's own doing; None, unknown, where anything else failed."""
        if self.status is Status.COMPLETED:
            return self.success
        return 0.0 if "overlong" in self.metrics else None

    @property
    def trouble(self) -> str:
        """Why it was not completed: a name of `_COUNTED`, `late/` and what, or the error's class; "" if it was."""
        if not self.error:
            return ""
        counted = (name for name in self.metrics if name in _COUNTED or name.startswith("late/"))
        return next(counted, self.error.partition(":")[0])

    @property
    def path(self) -> tuple[Turn, ...]:
        """The turns that led to the outcome: all of them outside tree sampling."""
        return tuple(turn for turn in self.turns if f"{self.leaf}.".startswith(f"{turn.node}." if turn.node else ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Trajectories of the same task."""

    task: Task
    trajectories: tuple[Trajectory, ...]


_TYPES = {
    "string": pa.string(),
    "strings": pa.list_(pa.string()),
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "tokens": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "scores": pa.map_(pa.string(), pa.float64()),
}


def _columns(text: str) -> list[tuple[str, pa.DataType]]:
    """Columns written as `name:type`, in their order; a type is one of `_TYPES`."""
    return [(name, _TYPES[kind]) for name, _, kind in (column.partition(":") for column in text.split())]


_TYPES["spans"] = pa.list_(pa.struct(_columns("version:int64 start:int32 end:int32")))
_TYPES["calls"] = pa.list_(pa.struct(_columns("id:string name:string arguments:string")))
_TYPES["messages"] = pa.list_(
    pa.struct(_columns("role:string content:string reasoning:string calls:calls answers:string raw:string"))
)
_TYPES["turns"] = pa.list_(
    pa.struct(
        _columns("""
            index:int32 round:int32 agent:string policy:string policy_version:int64 versions:spans node:string
            state_key:string anchor:string messages:messages prompt_ids:tokens completion_ids:tokens logprobs:logprobs
            temperature:float32 text:string finish_reason:string valid:bool seed:uint64 scores:scores reward:float64
            masked:bool chat:string started_s:float64 took_s:float64
        """)
    )
)
_TYPES["tools"] = pa.list_(
    pa.struct(
        _columns("""
            after_turn:int32 node:string tool:string query:string result:string failed:bool started_s:float64
            took_s:float64
        """)
    )
)
TASK_SCHEMA = pa.schema(_columns("id:string prompt:string answers:strings env:string source:string split:string"))
TRAJECTORY_SCHEMA = pa.schema(
    _columns("""
        id:string task_id:string source:string sample:int32 step:int64 turns:turns tools:tools outcome:float64
        answer:string leaf:string metrics:scores status:string error:string
    """)
)


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Write tasks with their digest as parquet, complete or not at all."""
    rows = [asdict(task) for task in tasks]
    _write(path, pa.Table.from_pylist(rows, schema=TASK_SCHEMA.with_metadata({_DIGEST: tasks_digest(tasks)})))


def read_tasks(path: Path) -> list[Task]:
    """Read tasks written by `write_tasks`, or by anyone with the same columns.

    Raises:
        RecordError: the file is missing, is not parquet, lacks a column, is not what `write_tasks` wrote, or has a task
            without an id, a prompt or a value of another column.
    """
    rows = _read(path, TASK_SCHEMA)
    for number, row in enumerate(rows):
        if fault := _fault(row):
            raise RecordError(f"{path}: row {number}: {fault}; make the file again")
    tasks = [Task(**{**row, "answers": tuple(row["answers"])}) for row in rows]
    written = (pq.read_schema(path).metadata or {}).get(_DIGEST)
    if written is not None and written != tasks_digest(tasks).encode():
        raise RecordError(f"{path}: not what was written (its digest is another); make the file again")
    return tasks


def tasks_digest(tasks: Sequence[Task]) -> str:
    """What tells tasks from others, in their order: SHA-256, in hexadecimal."""
    return hashlib.sha256(json.dumps([asdict(task) for task in tasks]).encode()).hexdigest()


_DIGEST = b"mcore_mas.sha256"
_PATH_LIKE = re.compile(r"^[/~]|(^|/)\.\.?(/|$)|[\x00-\x1f\x7f\\]")


def _fault(row: Mapping[str, Any]) -> str:
    """What is wrong with a task's row, "" if nothing is."""
    if missing := [name for name, value in row.items() if value is None or (name == "answers" and None in value)]:
        return f"no {missing[0]}"
    if not row["id"] or _PATH_LIKE.search(row["id"]):
        return f"id {row['id'][:100]!r}; expected a name without `..`, backslashes and control characters"
    return ""


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write trajectories as parquet with every id and token, complete or not at all."""
    rows = []
    for trajectory in trajectories:
        row = asdict(trajectory)
        row["metrics"] = list(trajectory.metrics.items())
        for turn in row["turns"]:
            turn["scores"] = list(turn["scores"].items())
        rows.append(row)
    _write(path, pa.Table.from_pylist(rows, schema=TRAJECTORY_SCHEMA))


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read trajectories written by `write_trajectories`, also of a version that recorded less of turns and tools.

    Of a folder of such files, all of them in the order of their names.

    Raises:
        RecordError: the file is missing, is not parquet, or lacks a column.
    """
    files = sorted(path.glob("*.parquet")) or [path]
    return [_trajectory(row) for file in files for row in _read(file, TRAJECTORY_SCHEMA)]


def _trajectory(row: dict[str, Any]) -> Trajectory:
    turns = tuple(
        Turn(
            **{
                **_known(turn),
                "versions": tuple(VersionSpan(**span) for span in turn["versions"] or ()),
                "messages": tuple(_message(message) for message in turn["messages"]),
                "prompt_ids": tuple(turn["prompt_ids"]),
                "completion_ids": tuple(turn["completion_ids"]),
                "logprobs": tuple(turn["logprobs"]),
                "scores": dict(turn["scores"]),
            }
        )
        for turn in row["turns"]
    )
    tools = tuple(ToolEvent(**_known(tool)) for tool in row["tools"])
    rest = {"turns": turns, "tools": tools, "metrics": dict(row["metrics"]), "status": Status(row["status"])}
    return Trajectory(**{**row, **rest})


def _message(row: Mapping[str, Any]) -> Message:
    calls = tuple(ToolUse(**call) for call in row["calls"] or ())
    return Message(**{**_known(row), "calls": calls})


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without what an older file does not have, for which the record has a default."""
    return {name: value for name, value in row.items() if value is not None}


def _write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)


def _read(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    if not path.is_file():
        raise RecordError(f"{path}: no such file; expected a parquet file with columns {', '.join(schema.names)}")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise RecordError(f"{path}: not a readable parquet file ({reason}); name another, or make it again") from error
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise RecordError(f"{path}: no column {', '.join(missing)}; expected {', '.join(schema.names)}")
    try:
        rows: list[dict[str, Any]] = table.select(schema.names).cast(schema).to_pylist()
    except (pa.ArrowException, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RecordError(f"{path}: a column has another type than expected ({reason}); make the file again") from error
    return rows
