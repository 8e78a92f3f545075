"""Traces of trajectories in MLflow: one span per turn and tool call, with its time.

Each trajectory is a session. Its outcome and the rewards and advantages of its agents are assessments
of the trace. The spans also have the attributes of OpenTelemetry's conventions for generative AI.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mcore_mas.config.run import RunConfig
from mcore_mas.credit.samples import TurnId
from mcore_mas.reports.game_pictures import draw_trajectory, picture_name
from mcore_mas.tracking.mlflow_store import MlflowStore, open_store
from mcore_mas.tracking.mlflow_training import TrainingRecord, find_or_create_training_run
from mcore_mas.tracking.sender import short_error
from rollout.records.trajectory import Group, Status, Task, ToolEvent, Trajectory, Turn

if TYPE_CHECKING:
    from mlflow.entities import Feedback

_MAX_WAITING = 64
# MLflow refuses a trace whose session has more than 250 characters. The end of a trajectory's id has
# the number of its sample.
_SESSION_ID_CHARS = 200
# Attributes of a turn's span that are fields of the turn.
_TURN_FIELDS = (
    "agent",
    "policy",
    "node",
    "temperature",
    "finish_reason",
    "valid",
    "masked",
    "reward",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTrajectory:
    """A trajectory to trace, with the advantages of its turns."""

    trajectory: Trajectory
    task: Task
    advantages: Mapping[TurnId, float]


class TraceSender:
    """A thread that writes traces to the MLflow run of a training.

    Trajectories of games are also drawn; the pictures are artifacts of the run. A trace that MLflow
    does not take is dropped: the trajectory stays in the run's folder, where `mcore-mas show` and the
    studio read it.
    """

    def __init__(
        self, config: RunConfig, record: TrainingRecord, warn: Callable[[str], None]
    ) -> None:
        """Start the thread, which connects to MLflow when it has a first trace."""
        self._config = config
        self._record = record
        self._warn = warn
        self._waiting: queue.Queue[TracedTrajectory | None] = queue.Queue()
        self._store: MlflowStore | None = None
        self._run_id = ""
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="trace sender", daemon=True)
        self._thread.start()

    def send(self, traced: Sequence[TracedTrajectory]) -> None:
        """Queue trajectories to be traced. They are dropped while 64 are waiting for a slow MLflow."""
        for item in traced:
            if self._waiting.qsize() < _MAX_WAITING:
                self._waiting.put(item)

    def close(self) -> None:
        """Ask the thread to stop after the traces that are waiting."""
        self._waiting.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to stop; give up the traces that are left after the timeout."""
        self._thread.join(max(0.0, timeout_s))

    def _run(self) -> None:
        for item in iter(self._waiting.get, None):
            try:
                self._write(item)
            except Exception as error:  # MLflow and its stores raise errors of any type
                if not self._failing:
                    self._warn(
                        f"MLflow does not take the trace of {item.trajectory.id} "
                        f"({short_error(error)}); traces are dropped until it works again"
                    )
                self._failing = True
            else:
                self._failing = False

    def _write(self, item: TracedTrajectory) -> None:
        if self._store is None:
            store = open_store(self._config)
            run = find_or_create_training_run(store, self._config, self._record)
            self._run_id = run.info.run_id
            self._store = store

        import mlflow

        mlflow.set_tracking_uri(self._store.uri)
        with _raise_if_refused():
            write_trace(item.trajectory, item.advantages, self._store.experiment_id, self._run_id)
        picture = draw_trajectory(item.task, item.trajectory)
        if picture is not None:
            folder = f"pictures/step_{item.trajectory.step:06d}"
            path = f"{folder}/{picture_name(item.trajectory)}"
            self._store.client.log_text(self._run_id, picture, path)


class TraceRefused(Exception):
    """MLflow's server or database does not take a trace; the message is that of MLflow."""


class _MessageList(logging.Handler):
    """A log handler that keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _raise_if_refused() -> Iterator[None]:
    """Raise TraceRefused if MLflow logs, within this block, that it cannot export a trace.

    MLflow itself raises no error.
    """
    logger = logging.getLogger("mlflow.tracing.export")
    handler = _MessageList()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    if handler.messages:
        raise TraceRefused(handler.messages[0])


def choose_trajectories(groups: Sequence[Group], count: int) -> list[tuple[Trajectory, Task]]:
    """Return up to `count` trajectories with their tasks.

    The first trajectory of each group comes first, then the second of each, and so on.
    """
    largest = max((len(group.trajectories) for group in groups), default=0)
    chosen = []
    for number in range(largest):
        for group in groups:
            if number < len(group.trajectories):
                chosen.append((group.trajectories[number], group.task))
    return chosen[:count]


def write_trace(
    trajectory: Trajectory, advantages: Mapping[TurnId, float], experiment_id: str, run_id: str
) -> None:
    """Write the trace of a trajectory to MLflow's current tracking URI.

    MLflow logs a warning if its server refuses the trace.
    """
    import mlflow
    from mlflow.tracing.constant import GenAiSemconvKey, TraceMetadataKey

    events: list[Turn | ToolEvent] = [*trajectory.turns, *trajectory.tools]
    events.sort(key=lambda event: event.started_s)
    if not events:
        return

    session = f"{run_id}/{trajectory.id[-_SESSION_ID_CHARS:]}"
    root = mlflow.start_span_no_context(
        f"{trajectory.source}/{trajectory.task_id}",
        span_type="AGENT",
        inputs={"task": trajectory.task_id},
        attributes={
            "step": trajectory.step,
            "sample": trajectory.sample,
            **trajectory.metrics,
            GenAiSemconvKey.OPERATION_NAME: "invoke_agent",
            GenAiSemconvKey.CONVERSATION_ID: session,
        },
        metadata={TraceMetadataKey.SOURCE_RUN: run_id, TraceMetadataKey.TRACE_SESSION: session},
        tags={
            "step": str(trajectory.step),
            "trajectory": trajectory.id,
            "outcome": str(trajectory.outcome),
        },
        experiment_id=experiment_id,
        start_time_ns=_nanoseconds(events[0].started_s),
    )
    for event in events:
        if isinstance(event, ToolEvent):
            arguments = _tool_span(event)
            outputs = event.result
        else:
            arguments = _turn_span(event, advantages.get((trajectory.id, event.node, event.index)))
            outputs = event.text
        span = mlflow.start_span_no_context(
            parent_span=root,
            start_time_ns=_nanoseconds(event.started_s),
            **arguments,
        )
        span.end(outputs=outputs, end_time_ns=_nanoseconds(event.started_s + event.took_s))

    completed = trajectory.status is Status.COMPLETED
    result = {
        "outcome": trajectory.outcome,
        "answer": trajectory.answer,
        "status": trajectory.status.value,
    }
    if not completed:
        result["error"] = trajectory.error
    _add_assessments(root.trace_id, assessments(trajectory, advantages))
    root.end(
        outputs=result,
        status="OK" if completed else "ERROR",
        end_time_ns=_nanoseconds(max(event.started_s + event.took_s for event in events)),
    )


def assessments(trajectory: Trajectory, advantages: Mapping[TurnId, float]) -> "list[Feedback]":
    """Return the outcome of a trajectory, and each agent's mean reward and advantage, as feedback.

    The means are over the turns of the agent that have a value. An agent without one, such as a
    frozen agent without an advantage, has no feedback of this name.
    """
    values: dict[str, list[float]] = {}
    if trajectory.outcome is not None:
        values["outcome"] = [trajectory.outcome]
    for turn in trajectory.turns:
        advantage = advantages.get((trajectory.id, turn.node, turn.index))
        for name, value in (("reward", turn.reward), ("advantage", advantage)):
            if value is not None:
                values.setdefault(f"{name}/{turn.agent}", []).append(value)

    from mlflow.entities import AssessmentSource, AssessmentSourceType, Feedback

    source = AssessmentSource(source_type=AssessmentSourceType.CODE, source_id="mcore_mas")
    return [
        Feedback(name=name, value=fmean(numbers), source=source) for name, numbers in values.items()
    ]


def _add_assessments(trace_id: str, feedback: "Sequence[Feedback]") -> None:
    """Add feedback to a trace that has not ended, so that both are sent in one request.

    mlflow.log_assessment would send a request for each of them.
    """
    from mlflow.tracing.trace_manager import InMemoryTraceManager

    with InMemoryTraceManager.get_instance().get_trace(trace_id) as trace:
        # There is no trace if tracing is switched off (MLFLOW_TRACE_SAMPLING_RATIO).
        if trace is not None:
            trace.info.assessments.extend(feedback)


def _tool_span(event: ToolEvent) -> dict[str, Any]:
    """Return the arguments of the span of a tool call."""
    from mlflow.tracing.constant import GenAiSemconvKey

    return {
        "name": event.tool,
        "span_type": "TOOL",
        "inputs": {"query": event.query},
        "attributes": {
            "failed": event.failed,
            "node": event.node,
            GenAiSemconvKey.OPERATION_NAME: "execute_tool",
            GenAiSemconvKey.TOOL_NAME: event.tool,
        },
    }


def _turn_span(turn: Turn, advantage: float | None) -> dict[str, Any]:
    """Return the arguments of the span of a turn, without attributes that are None."""
    from mlflow.tracing.constant import GenAiSemconvKey, SpanAttributeKey

    prompt_tokens = len(turn.prompt_ids)
    reply_tokens = len(turn.completion_ids)
    attributes: dict[str, Any] = {name: getattr(turn, name) for name in _TURN_FIELDS}
    attributes |= {
        "versions": sorted({span.version for span in turn.versions} or {turn.policy_version}),
        "turn": turn.index,
        "tokens": reply_tokens,
        "logprob": sum(turn.logprobs),
        "advantage": advantage,
        SpanAttributeKey.CHAT_USAGE: {
            "input_tokens": prompt_tokens,
            "output_tokens": reply_tokens,
            "total_tokens": prompt_tokens + reply_tokens,
        },
        GenAiSemconvKey.OPERATION_NAME: "chat",
        GenAiSemconvKey.AGENT_NAME: turn.agent,
        GenAiSemconvKey.REQUEST_MODEL: turn.policy,
        GenAiSemconvKey.REQUEST_TEMPERATURE: turn.temperature,
        GenAiSemconvKey.RESPONSE_FINISH_REASONS: [turn.finish_reason],
        GenAiSemconvKey.USAGE_INPUT_TOKENS: prompt_tokens,
        GenAiSemconvKey.USAGE_OUTPUT_TOKENS: reply_tokens,
    }
    for name, score in turn.scores.items():
        attributes[f"score.{name}"] = score

    messages = [{"role": message.role, "content": message.text} for message in turn.messages]
    return {
        "name": turn.agent,
        "span_type": "CHAT_MODEL",
        "inputs": {"messages": messages},
        "attributes": {name: value for name, value in attributes.items() if value is not None},
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
