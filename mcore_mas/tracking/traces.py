"""Traces of trajectories in MLflow: a span for every turn and every tool call, at the times when they happened.

Where a trajectory has a picture, the run has it as an artifact.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

from mcore_mas.credit.samples import TurnId
from mcore_mas.reports.pages import file_name
from mcore_mas.tracking.feed import Tracker
from rollout.records.trajectory import Group, Status, ToolEvent, Trajectory, Turn

DrawTrajectory = Callable[[Trajectory], str | None]  # its picture as SVG, None without one
_Waiting = tuple[
    Trajectory, Mapping[TurnId, float], DrawTrajectory, int
]  # the last: how often it is tried, with this
_MOST_WAIT, _TRIES = 64, 3
_EXPORTER = "mlflow.tracing.export.mlflow_v3"  # whose log is the only place where it says that a trace was refused


class Traces:
    """Writes traces into a tracker's MLflow run, in its thread; the newest of those that it does not take wait."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]) -> None:
        """`warn` is told of the first refusal since the store worked."""
        self._tracker, self._warn = tracker, warn
        self._waiting: deque[_Waiting] = deque(maxlen=_MOST_WAIT)
        self._refused = False

    def send(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Mapping[TurnId, float],
        draw: DrawTrajectory = lambda _: None,
    ) -> None:
        """Have `trajectories` written, and return at once."""
        self._waiting += [(trajectory, advantages, draw, 1) for trajectory in trajectories]
        self._tracker.sink.put(self._write)

    def _write(self) -> None:
        """Write what waits, up to one that MLflow does not take, which waits on for `_TRIES` tries in all."""
        while self._waiting:
            trajectory, advantages, draw, tries = self._waiting.popleft()
            if why := self._refusal(trajectory, advantages, draw):
                if tries < _TRIES:
                    self._waiting.appendleft((trajectory, advantages, draw, tries + 1))
                if not self._refused:
                    self._warn(
                        f"MLflow does not take the trace of {trajectory.id} ({why}); traces wait for the next"
                    )
                self._refused = True
                return
            self._refused = False

    def _refusal(
        self, trajectory: Trajectory, advantages: Mapping[TurnId, float], draw: DrawTrajectory
    ) -> str:
        """Write one; why MLflow did not take it, or ""."""
        run_id = self._tracker.run_id
        if not self._tracker.store.experiment_id or run_id is None:
            return "there is no connection"
        import mlflow

        said: list[str] = []

        def unsaid(record: logging.LogRecord) -> bool:
            """Keeps what the exporter would have logged."""
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())
            return record.levelno < logging.WARNING

        log = logging.getLogger(_EXPORTER)
        log.addFilter(unsaid)
        try:
            mlflow.set_tracking_uri(self._tracker.store.uri)
            write_trace(trajectory, advantages, self._tracker.store.experiment_id, run_id)
            if picture := draw(trajectory):
                place = f"pictures/step_{trajectory.step:06d}/{file_name(trajectory)}"
                mlflow.MlflowClient(self._tracker.store.uri).log_text(run_id, picture, place)
        except Exception as error:  # whatever a store may raise: a trace is worth no training
            said.append(f"{type(error).__name__}: {error}")
        finally:
            log.removeFilter(unsaid)
        return said[0].splitlines()[0][:200] if said else ""


def chosen(groups: Sequence[Group], count: int) -> list[Trajectory]:
    """`count` trajectories of as many tasks as there are: the first of every group, then the second, and so on."""
    rounds = zip_longest(*(group.trajectories for group in groups))
    return list(islice((t for one in rounds for t in one if t is not None), count))


def write_trace(
    trajectory: Trajectory, advantages: Mapping[TurnId, float], experiment_id: str, run_id: str
) -> None:
    """Write one trace to MLflow's current store; its exporter logs what goes wrong."""
    import mlflow
    from mlflow.tracing.constant import TraceMetadataKey

    events: list[Turn | ToolEvent] = [*trajectory.turns, *trajectory.tools]
    events.sort(key=lambda event: event.started_s)
    if not events:
        return
    first, last = events[0].started_s, max(event.started_s + event.took_s for event in events)
    root = mlflow.start_span_no_context(
        f"{trajectory.source}/{trajectory.task_id}",
        span_type="AGENT",
        inputs={"task": trajectory.task_id},
        attributes={"step": trajectory.step, "sample": trajectory.sample, **trajectory.metrics},
        metadata={TraceMetadataKey.SOURCE_RUN: run_id},
        tags={
            "step": str(trajectory.step),
            "trajectory": trajectory.id,
            "outcome": str(trajectory.outcome),
        },
        experiment_id=experiment_id,
        start_time_ns=round(first * 1e9),
    )
    for event in events:
        result, told = _span(event, trajectory.id, advantages)
        span = mlflow.start_span_no_context(
            parent_span=root, start_time_ns=round(event.started_s * 1e9), **told
        )
        span.end(outputs=result, end_time_ns=round((event.started_s + event.took_s) * 1e9))
    well = trajectory.status is Status.COMPLETED
    outputs = {
        "outcome": trajectory.outcome,
        "answer": trajectory.answer,
        "status": trajectory.status.value,
    }
    root.end(
        outputs=outputs if well else {**outputs, "error": trajectory.error},
        status="OK" if well else "ERROR",
        end_time_ns=round(last * 1e9),
    )


_TOLD = (
    "agent",
    "policy",
    "node",
    "temperature",
    "finish_reason",
    "valid",
    "masked",
    "reward",
)  # of a turn


def _span(
    event: Turn | ToolEvent, trajectory: str, advantages: Mapping[TurnId, float]
) -> tuple[str, dict[str, Any]]:
    """(what came of an event, what else MLflow is told of its span); what was not measured is left out."""
    from mlflow.tracing.constant import SpanAttributeKey

    if isinstance(event, ToolEvent):
        of_tool = {
            "inputs": {"query": event.query},
            "attributes": {"failed": event.failed, "node": event.node},
        }
        return event.result, {"name": event.tool, "span_type": "TOOL", **of_tool}
    read, said = len(event.prompt_ids), len(event.completion_ids)
    attributes = {name: getattr(event, name) for name in _TOLD} | {
        "versions": sorted({span.version for span in event.versions} or {event.policy_version}),
        "turn": event.index,
        "tokens": said,
        "logprob": sum(event.logprobs),
        "advantage": advantages.get((trajectory, event.node, event.index)),
        SpanAttributeKey.CHAT_USAGE: {
            "input_tokens": read,
            "output_tokens": said,
            "total_tokens": read + said,
        },
        **{f"score.{name}": value for name, value in event.scores.items()},
    }
    known = {name: value for name, value in attributes.items() if value is not None}
    inputs = {
        "messages": [{"role": message.role, "content": message.text} for message in event.messages]
    }
    return event.text, {
        "name": event.agent,
        "span_type": "CHAT_MODEL",
        "inputs": inputs,
        "attributes": known,
    }
