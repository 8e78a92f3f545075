"""Records of rollouts: tasks, completions, turns, trajectories and groups, and the seeds of all that is drawn.

Records are frozen, and their texts are valid Unicode: what others wrote is cleaned on its way in. Tokens are written
once, by the engine that sampled them, and never re-tokenised. Every row carries every id, so any grouping is one key
function over a row (see `mcore_mas.credit.samples`).
"""

from __future__ import annotations

import enum
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BeforeValidator

from rollout.base.text import valid_text

# Which experts of a mixture the engine sent each token to: [tokens, sparse layers, k] as `Experts` writes numbers; b""
# where nobody knows. The last token of all is not among them: nothing was computed of it. In JSON it is base64
Routing = Annotated[
    bytes,
    BeforeValidator(lambda value: urlsafe_b64decode(value) if isinstance(value, str) else value),
]
_COUNTED = (
    "overlong",
    "undecided",
    "quarantined",
)  # why a trajectory failed, as its metrics name it


def clean_fields(record: Any, *names: str) -> None:
    """Make text fields of a frozen record valid, also tuples of texts, in its `__post_init__`."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, str) and not value.isascii():
            object.__setattr__(record, name, valid_text(value))
        elif isinstance(value, tuple):
            object.__setattr__(record, name, tuple(map(valid_text, value)))


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
        if not (self.content.isascii() and self.reasoning.isascii() and self.raw.isascii()):
            clean_fields(self, "content", "reasoning", "raw")

    @property
    def text(self) -> str:
        """All that was said."""
        return self.raw or self.content

    @property
    def size(self) -> int:
        """Characters of what was said and of its calls."""
        return len(self.text) + sum(len(call.arguments) for call in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation in which an agent replies as it should: material for a cold start."""

    agent: str
    messages: tuple[Message, ...]  # the loss is on the assistant's messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is sampled."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    max_tokens: int = 512  # completion tokens, the stop token included
    stop: tuple[int, ...] = ()  # token ids that end a completion
    seed: int = 0  # 64-bit; equal seed, prompt and weights give equal tokens, where the engine can promise it
    session: str = field(
        default="", compare=False
    )  # requests of one session find each other's cached prefixes


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
    routing: Routing = field(default=b"", repr=False)  # [P + C - 1, ...] of prompt and completion

    def ended(self, size: int, prompt: int) -> Completion:
        """Its first `size` tokens, at least one, behind a prompt of so many, as a reply that stopped there."""
        return replace(
            self,
            token_ids=self.token_ids[:size],
            logprobs=self.logprobs[:size],
            finish_reason="stop",
            versions=tuple(
                replace(span, end=min(span.end, size))
                for span in self.versions
                if span.start < size
            ),
            routing=self.routing[
                : len(self.routing) // (prompt + len(self.token_ids) - 1) * (prompt + size - 1)
            ],
        )


# of a model that answers in text alone
SILENCE = Completion(
    token_ids=(),
    logprobs=(),
    finish_reason="stop",
    versions=(VersionSpan(version=0, start=0, end=0),),
)


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
    versions: tuple[
        VersionSpan, ...
    ] = ()  # which of them sampled which tokens; (): `policy_version` all
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
    scores: Mapping[str, float] = field(
        default_factory=dict
    )  # what was measured of this turn, by name
    reward: float | None = None  # set by a reward allocator
    chat: str = (
        ""  # which chat of its agent it belongs to, as "coder/0"; "" for one that was asked once
    )
    masked: bool = False  # does not train; its reward is None where nothing can be said of it, and counts for its peers
    started_s: float = field(default=0.0, compare=False)  # Unix time
    took_s: float = field(
        default=0.0, compare=False
    )  # until the reply was there, waiting for a slot included
    routing: Routing = field(default=b"", repr=False)  # [P + C - 1, ...] of prompt and completion

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
    step: int  # of the training; negative in a validation, an evaluation and a chat
    turns: tuple[Turn, ...]
    tools: tuple[ToolEvent, ...] = ()
    outcome: float | None = None  # the environment's score of the whole trajectory
    answer: str | None = (
        None  # the final answer, equal ones written equally; "": none given, None: not reported
    )
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
        return tuple(
            turn
            for turn in self.turns
            if f"{self.leaf}.".startswith(f"{turn.node}." if turn.node else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Trajectories of the same task."""

    task: Task
    trajectories: tuple[Trajectory, ...]
