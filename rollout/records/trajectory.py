"""Records of rollouts: tasks, messages, completions, turns, trajectories and groups.

Records are frozen. Their texts are valid Unicode: texts that models and tools wrote are repaired
when a record is made. The tokens of a reply are those that the engine sampled; training does not
tokenize its text again. A turn has no id of its task or trajectory; `mcore_mas.credit.samples` adds
them to each sample.
"""

from __future__ import annotations

import enum
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BeforeValidator

from rollout.base.text import valid_text

# Experts of a mixture to which the engine sent each token: [tokens, sparse layers, k], with the
# numbers as `Experts` encodes them; b"" if they are not known. The last token is not included,
# since nothing was computed from it. In JSON the bytes are base64.
Routing = Annotated[
    bytes,
    BeforeValidator(lambda value: urlsafe_b64decode(value) if isinstance(value, str) else value),
]
# Score of a turn that is an alternative: the outcome of the trajectory that was replayed with it.
REPLAY_OUTCOME = "replay_outcome"
# Tokens that could have been sampled at a position, the likeliest first, with their
# log-probabilities.
TokenCandidates = tuple[tuple[int, float], ...]
# Metrics that say why a trajectory failed.
_FAILURE_METRICS = ("overlong", "undecided", "unasked", "quarantined")


# Values of `Trajectory.step` outside of the steps of a training. They also begin the ids of
# trajectories and the paths of their seeds.
VALIDATION_STEP = -1
EVALUATION_STEP = -2
CHAT_STEP = -3


def clean_fields(record: Any, *names: str) -> None:
    """Replace invalid Unicode in text fields of a frozen record, from its `__post_init__`.

    Args:
        record: record whose fields are set.
        names: fields that are texts or tuples of texts.
    """
    for name in names:
        value = getattr(record, name)
        if isinstance(value, str) and not value.isascii():
            object.__setattr__(record, name, valid_text(value))
        elif isinstance(value, tuple):
            object.__setattr__(record, name, tuple(map(valid_text, value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A problem for a team.

    Attributes:
        answers: all accepted answers.
        env: name of the environment in `ENVS`.
        source: data set that the task comes from; results are reported per source.
        split: "train", "validation" or "test".
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    env: str
    source: str
    split: str

    def __post_init__(self) -> None:
        clean_fields(self, "id", "prompt", "answers", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A tool call that an assistant asks for.

    Attributes:
        id: id that the result of the call refers to.
        arguments: JSON object.
    """

    id: str
    name: str
    arguments: str

    def __post_init__(self) -> None:
        clean_fields(self, "id", "name", "arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A chat message.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        reasoning: thoughts of an assistant.
        calls: tool calls of an assistant.
        answers: id of the tool call whose result this message is.
        raw: text as it was sampled, with thoughts and tool calls, if it differs from `content`.
            Chat templates get `raw` and not the fields that were parsed from it.
    """

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolUse, ...] = ()
    answers: str = ""
    raw: str = ""

    def __post_init__(self) -> None:
        if not (self.content.isascii() and self.reasoning.isascii() and self.raw.isascii()):
            clean_fields(self, "content", "reasoning", "raw")

    @property
    def text(self) -> str:
        """The whole text, with thoughts and tool calls if it was sampled with them."""
        return self.raw or self.content

    @property
    def size(self) -> int:
        """Number of characters of the text and of the tool calls' arguments."""
        return len(self.text) + sum(len(call.arguments) for call in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation with replies that an agent should imitate, for supervised fine-tuning.

    Attributes:
        messages: the conversation; the loss is computed on the assistant's messages.
    """

    agent: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of one completion.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        max_tokens: maximum of completion tokens, including the stop token.
        stop: token ids that end a completion.
        seed: 64-bit seed. Equal seeds, prompts and weights give equal tokens, if the engine is
            deterministic.
        grammar: Lark grammar that the completion must follow (see `rollout.models.grammars`); ""
            allows all tokens.
        candidates: number of the likeliest tokens that are reported for each sampled one.
        session: name of a session, whose requests go to the same SGLang server, and share its prefix
            cache, unless the server is full.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512
    stop: tuple[int, ...] = ()
    seed: int = 0
    grammar: str = ""
    candidates: int = 0
    session: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Completion tokens from `start` to `end - 1`, which one version of the weights has sampled."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Completion that an engine returns for one prompt.

    Attributes:
        token_ids: sampled tokens [C], including the stop token.
        logprobs: log-probabilities [C] after temperature, of the distribution over the tokens that
            the grammar allows, or over all tokens without one.
        finish_reason: "stop", "length" or "abort".
        versions: versions of the weights that sampled the tokens.
        cached_tokens: number of prompt tokens whose keys and values came from the prefix cache.
        routing: experts of prompt and completion [P + C - 1, ...].
        candidates: likeliest tokens [C] at each position; () if the sampling asks for none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    cached_tokens: int = 0
    routing: Routing = field(default=b"", repr=False)
    candidates: tuple[TokenCandidates, ...] = field(default=(), repr=False)

    def stopped_after(self, size: int, prompt_length: int) -> Completion:
        """Return the completion as if it had ended with "stop" after its first `size` tokens.

        Args:
            size: number of completion tokens to keep, at least 1.
            prompt_length: number of prompt tokens.
        """
        spans = [span for span in self.versions if span.start < size]
        routed_tokens = prompt_length + len(self.token_ids) - 1
        routing_bytes_per_token = len(self.routing) // routed_tokens
        return replace(
            self,
            token_ids=self.token_ids[:size],
            logprobs=self.logprobs[:size],
            finish_reason="stop",
            versions=tuple(replace(span, end=min(span.end, size)) for span in spans),
            routing=self.routing[: routing_bytes_per_token * (prompt_length + size - 1)],
            candidates=self.candidates[:size],
        )


# Completion of a model that returns text without tokens.
EMPTY_COMPLETION = Completion(
    token_ids=(),
    logprobs=(),
    finish_reason="stop",
    versions=(VersionSpan(version=0, start=0, end=0),),
)


class Status(enum.StrEnum):
    """Outcome of playing a trajectory; only COMPLETED ones are trained on."""

    COMPLETED = "completed"
    # An engine, a tool or the environment failed; it is masked instead of scored with 0.
    FAILED = "failed"
    LATE = "late"  # a call, a tool or the whole trajectory missed its deadline
    ABORTED = "aborted"  # given up, because its batch was late or its group was full


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn: one LLM call of one agent.

    Names in `scores`, besides the metrics of the environment's steps that ended the turn's round:

    - `team`: sum of the rewards of these steps
    - `local`: the orchestra's score of this turn
    - `undecided`: 1, in place of `local`, if the environment could not decide that score
    - `penalty`: sum of the penalties that were added to the reward
    - `branch`: score by which a tree chose among branches
    - `replay_outcome`: outcome of the trajectory that was replayed with this alternative
    - `replay_sampled`: number of later turns of that replay that were sampled anew
    - `replay_recorded`: number of later turns of that replay that were repeated from the trajectory
    - `removal`: outcome of the trajectory minus that of a replay with an empty reply at this turn
    - `cut`: 1 if part of a prompt that was too long was left out

    In chats:

    - `tool_calls`, `malformed_calls`: numbers of the reply's tool calls
    - `root`: 1 if the chat was tokenized anew, because its template rewrote earlier messages or
      because it was shortened
    - `folded`: 1 if the full chat before this turn was replaced by a summary
    - `dropped_results`: number of tool results that were left out of the full chat before this turn
    - `full`: 1 if the chat had no room for another turn

    In agent programs:

    - `unread`: 1 if the program did not wait for the reply
    - `crashed`: 1 on the latest turn before the program ended badly
    - `off_schema`: 1 if the reply does not have the JSON format that the call asks for
    - `unheeded/NAME`: 1 if the gateway ignored the part NAME of the call

    Attributes:
        index: position in the trajectory, from 0.
        round: number of the turn's round in the trajectory, from 0. The first turn after a step of
            the environment begins a new round.
        policy_version: version of the weights that sampled the end of the completion.
        versions: versions that sampled the tokens; (): `policy_version` sampled all of them.
        node: branch numbers from the root of a tree, such as "0.2.1"; "" without a tree. The
            alternatives of a turn that were replayed are "1", "2" and so on.
        state_key: digest of the prompt's messages.
        anchor: digest of the environment's description of its present state, without history; "" if
            the environment describes none.
        prompt_ids: prompt tokens [P].
        completion_ids: sampled tokens [C], including the stop token.
        logprobs: log-probabilities [C], as in `Completion`.
        text: completion without special tokens.
        finish_reason: "stop", "length" or "abort".
        valid: True if the reply is not malformed: it is not cut off, the role's parser read a value
            from it or it has tool calls, and every tool call is well-formed.
        seed: seed of the completion.
        scores: measurements of this turn, by the names above; what was not measured is absent.
        reward: set by a reward allocator; None before, and for masked turns without a reward.
        chat: id of the agent's chat, such as "coder/0"; "" for a single question.
        masked: True if the turn is not trained on. If it has a reward, the reward still counts in
            the statistics of its peers.
        started_s: Unix time of the call.
        took_s: seconds until the reply was complete, including the wait for a slot.
        routing: experts of prompt and completion [P + C - 1, ...].
        grammar: grammar that constrained the sampling, as in `Sampling`.
    """

    index: int
    round: int = 0
    agent: str
    policy: str
    policy_version: int
    versions: tuple[VersionSpan, ...] = ()
    node: str
    state_key: str
    anchor: str = ""
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    text: str
    finish_reason: str
    valid: bool
    seed: int
    scores: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None
    chat: str = ""
    masked: bool = False
    started_s: float = field(default=0.0, compare=False)
    took_s: float = field(default=0.0, compare=False)
    routing: Routing = field(default=b"", repr=False)
    grammar: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.text.isascii():
            clean_fields(self, "text")

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """The messages since the agent's latest reply in the chat; all messages without one."""
        replies = [i for i, message in enumerate(self.messages) if message.role == "assistant"]
        return self.messages[replies[-1] + 1 :] if replies else self.messages

    @property
    def oldest_version(self) -> int:
        """Oldest version of the weights that sampled a token."""
        return min((span.version for span in self.versions), default=self.policy_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEvent:
    """A tool call that was made for an agent.

    Attributes:
        after_turn: index of the turn that the call followed; -1 if it followed none.
        node: node of that turn; "" without one.
        failed: True if the call failed by the agent's fault.
        started_s: Unix time of the call.
        took_s: seconds until the call returned.
    """

    after_turn: int
    node: str = ""
    tool: str
    query: str
    result: str
    failed: bool = False
    started_s: float = field(default=0.0, compare=False)
    took_s: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        clean_fields(self, "tool", "query", "result")


def step_label(step: int) -> str:
    """Return the name of a step for people, who count from 1.

    Negative numbers are those of `Trajectory.step`.
    """
    if step >= 0:
        return f"step {step + 1}"
    return {VALIDATION_STEP: "validation", EVALUATION_STEP: "evaluation"}.get(step, "chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """All turns of a team on one task, in order.

    With tree sampling, the turns of the branches that were not continued are included, and with
    replays the alternatives of each turn.

    Attributes:
        sample: number of the trajectory in the group of its task, from 0.
        step: training step, from 0; negative in a validation, an evaluation and a chat.
        outcome: the environment's score of the whole trajectory.
        answer: final answer, with equal answers written equally; "": there is none; None: the
            environment does not report it.
        leaf: node of a tree that the outcome comes from: of the branch that was played to the end,
            or of the attempt that was chosen; "" if there is none.
        metrics: latest metrics of the environment's steps, and counts of dropped branches and
            replays. If the reason of a failure has a metric, that metric is the first.
        error: reason why the status is not COMPLETED.
    """

    id: str
    task_id: str
    source: str
    sample: int
    step: int
    turns: tuple[Turn, ...]
    tools: tuple[ToolEvent, ...] = ()
    outcome: float | None = None
    answer: str | None = None
    leaf: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    status: Status = Status.COMPLETED
    error: str = ""

    def __post_init__(self) -> None:
        clean_fields(self, "answer", "error")

    @property
    def title(self) -> str:
        """Sample and task for messages that name the step, such as "sample 2 of task train-31"."""
        return f"sample {self.sample} of task {self.task_id}"

    @property
    def success(self) -> float:
        """Success in an evaluation: the metric `solved` if there is one, else the outcome."""
        return self.metrics.get("solved", self.outcome or 0.0)

    @property
    def score(self) -> float | None:
        """`success` of a completed trajectory; 0 if a prompt was too long; None if it is unknown.

        A prompt that is too long is the team's own fault. After any other failure the score is
        unknown.
        """
        if self.status is Status.COMPLETED:
            return self.success
        return 0.0 if "overlong" in self.metrics else None

    @property
    def failure_reason(self) -> str:
        """Reason why the trajectory was not completed, for counting; "" if it was.

        It is "overlong", "undecided", "unasked", "quarantined", "late/" with the part that was late,
        or the part of the error before its first colon. This is the error's class, if it has one.
        """
        if not self.error:
            return ""
        # Later metrics may have the same names, but count branches and replays that were dropped.
        first_metric = next(iter(self.metrics), "")
        if first_metric in _FAILURE_METRICS or first_metric.startswith("late/"):
            return first_metric
        return self.error.partition(":")[0]

    @property
    def path(self) -> tuple[Turn, ...]:
        """Turns that led to the outcome; without a tree, these are all turns."""
        return tuple(turn for turn in self.turns if self._is_on_path(turn))

    def _is_on_path(self, turn: Turn) -> bool:
        """Return True if the node of a turn is the leaf or above it."""
        return not turn.node or f"{self.leaf}.".startswith(f"{turn.node}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Trajectories of the same task."""

    task: Task
    trajectories: tuple[Trajectory, ...]
