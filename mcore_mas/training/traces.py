"""Traces of trajectories in MLflow: a span for every turn and every tool call, at the times when they happened.

Where a trajectory has a picture, the run has it as an artifact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, zip_longest
from typing import Any

from mcore_mas.credit.samples import TurnId
from mcore_mas.reports.pages import file_name
from mcore_mas.rollout.records.trajectory import Group, Status, ToolEvent, Trajectory, Turn
from mcore_mas.training.tracking import Tracker

DrawTrajectory = Callable[[Trajectory], str | None]  # its picture as SVG, None without one
_EXPORTER = "mlflow.tracing.export.mlflow_v3"  # whose log is the only place where it says that a trace was refused


class Traces:
    """Writes traces into a tracker's MLflow run, in its thread; when the store refuses one, it stops and says so."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]) -> None:
        """`warn` is told once, of the first refusal."""
        self._tracker, self._warn = tracker, warn
        self._refused = False

    def send(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Mapping[TurnId, float],
        draw: DrawTrajectory = lambda _: None,
    ) -> None:
        """Have `trajectories` written, and return at once."""
        for trajectory in trajectories:
            if not self._tracker.sink.put(partial(self._write, trajectory, advantages, draw)):
                self._refuse(trajectory, "too much waits for it")

    def _write(self, trajectory: Trajectory, advantages: Mapping[TurnId, float], draw: DrawTrajectory) -> None:
        run_id = self._tracker.run_id
        if self._refused:
            return
        if not self._tracker.store.experiment_id or run_id is None:
            self._refuse(trajectory, "there is no connection")
            return
        import mlflow

        said = _Said()
        log = logging.getLogger(_EXPORTER)
        log.addFilter(said)
        try:
            mlflow.set_tracking_uri(self._tracker.store.uri)
            write_trace(trajectory, advantages, self._tracker.store.experiment_id, run_id)
            if picture := draw(trajectory):
                place = f"pictures/step_{trajectory.step:06d}/{file_name(trajectory)}"
                mlflow.MlflowClient(self._tracker.store.uri).log_text(run_id, picture, place)
        except Exception as error:  # whatever a store may raise: a trace is worth no training
            said.lines.append(f"{type(error).__name__}: {error}")
        finally:
            log.removeFilter(said)
        if said.lines:
            self._refuse(trajectory, said.lines[0].splitlines()[0][:200])

    def _refuse(self, trajectory: Trajectory, why: str) -> None:
        if not self._refused:
            self._refused = True
            self._warn(f"no more traces: MLflow did not take {trajectory.id} ({why})")


class _Said(logging.Filter):
    """Keeps what the exporter would have logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())
        return record.levelno < logging.WARNING


def chosen(groups: Sequence[Group], count: int) -> list[Trajectory]:
    """`count` trajectories of as many tasks as there are: the first of every group, then the second, and so on."""
    rounds = zip_longest(*(group.trajectories for group in groups))
    return list(islice((t for one in rounds for t in one if t is not None), count))


def write_trace(trajectory: Trajectory, advantages: Mapping[TurnId, float], experiment_id: str, run_id: str) -> None:
    """Write one trace to MLflow's current store; its exporter logs what goes wrong."""
    import mlflow
    from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey

    events = sorted(_events(trajectory), key=lambda event: event.started_s)
    if not events:
        return
    first, last = events[0].started_s, max(event.started_s + event.took_s for event in events)
    root = mlflow.start_span_no_context(
        f"{trajectory.source}/{trajectory.task_id}",
        span_type="AGENT",
        inputs={"task": trajectory.task_id},
        attributes={"step": trajectory.step, "sample": trajectory.sample, **trajectory.metrics},
        metadata={TraceMetadataKey.SOURCE_RUN: run_id},
        tags={"step": str(trajectory.step), "trajectory": trajectory.id, "outcome": str(trajectory.outcome)},
        experiment_id=experiment_id,
        start_time_ns=_ns(first),
    )
    for event in events:
        place = (trajectory.id, event.node, event.index) if isinstance(event, Turn) else None
        advantage = advantages.get(place) if place else None
        name, kind, inputs, outputs, attributes = _span(event, advantage)
        span = mlflow.start_span_no_context(
            name,
            span_type=kind,
            parent_span=root,
            inputs=inputs,
            attributes=attributes,
            start_time_ns=_ns(event.started_s),
        )
        if isinstance(event, Turn):
            read, said = len(event.prompt_ids), len(event.completion_ids)
            usage = {"input_tokens": read, "output_tokens": said, "total_tokens": read + said}
            span.set_attribute(SpanAttributeKey.CHAT_USAGE, usage)
        span.end(outputs=outputs, end_time_ns=_ns(event.started_s + event.took_s))
    well = trajectory.status is Status.COMPLETED
    outputs = {"outcome": trajectory.outcome, "answer": trajectory.answer, "status": trajectory.status.value}
    root.end(
        outputs=outputs if well else {**outputs, "error": trajectory.error},
        status="OK" if well else "ERROR",
        end_time_ns=_ns(last),
    )


def _events(trajectory: Trajectory) -> Iterator[Turn | ToolEvent]:
    yield from trajectory.turns
    yield from trajectory.tools


def _span(event: Turn | ToolEvent, advantage: float | None) -> tuple[str, str, Any, Any, dict[str, Any]]:
    """(name, kind, inputs, outputs, attributes) of an event's span; what was not measured is left out."""
    if isinstance(event, ToolEvent):
        return event.tool, "TOOL", {"query": event.query}, event.result, {"failed": event.failed, "node": event.node}
    messages = [{"role": message.role, "content": message.text} for message in event.messages]
    attributes = {
        "agent": event.agent,
        "policy": event.policy,
        "versions": sorted({span.version for span in event.versions} or {event.policy_version}),
        "turn": event.index,
        "node": event.node,
        "tokens": len(event.completion_ids),
        "logprob": sum(event.logprobs),
        "temperature": event.temperature,
        "finish_reason": event.finish_reason,
        "valid": event.valid,
        "masked": event.masked,
        "reward": event.reward,
        "advantage": advantage,
        **{f"score.{name}": value for name, value in event.scores.items()},
    }
    known = {name: value for name, value in attributes.items() if value is not None}
    return event.agent, "CHAT_MODEL", {"messages": messages}, event.text, known


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
