"""Metric tracking: the run folder's metrics.jsonl, and an MLflow run with traces of trajectories.

MLflow may be slow, broken or gone: it is written from a thread of its own. A trace has a span for every turn and every
tool call, at the times when they happened. Where a trajectory has a picture, the run has it as an artifact.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from mcore_mas.credit.samples import TurnId
from mcore_mas.reports.pages import file_name
from rollout.base.files import json_lines, write_json, write_text
from rollout.records.trajectory import Group, Status, ToolEvent, Trajectory, Turn

_LONGEST_PARAM = 500  # characters; MLflow refuses more than 6000
_PARAMS_PER_CALL = 100  # MLflow's limit
_DIGEST = 36  # characters of a data set's digest that MLflow keeps
_PATIENCE_S = 30.0  # at the end of a run, for MLflow to take what is left


class Journal:
    """One JSON object per training step in a file that survives restarts."""

    def __init__(self, path: Path, first_step: int, warn: Callable[[str], None] = print) -> None:
        """Continue `path` at `first_step`; rows of steps that will be taken again are dropped."""
        self._path, self._warn = path, warn
        self._waiting = ""  # what could not be written yet
        rows = json_lines(path)[0] if path.is_file() else []
        kept = [row for row in rows if type(row.get("step")) is int and row["step"] < first_step]
        self._last: int = kept[-1]["step"] if kept else -2  # step of the last row
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in kept))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step, once: a run that was stopped right after it had made up a validation makes it up again.

        What cannot be written, because a disk is full, is told of and written with the next step.
        """
        if step <= self._last:
            return
        self._last = step
        self._waiting += json.dumps({"step": step, **metrics}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._waiting)
                file.flush()
                os.fsync(file.fileno())
            self._waiting = ""
        except OSError as error:
            self._warn(f"{self._path}: the metrics of step {step} wait for the next ({error.strerror})")
            if not self._waiting.startswith("\n"):
                self._waiting = f"\n{self._waiting}"  # part of it may be there


class Sink:
    """A thread for work that may fail or hang and that nobody waits for."""

    def __init__(self, name: str, most: int = 256) -> None:
        """At most `most` jobs wait."""
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object]) -> bool:
        """Have `job`, which handles its own errors, done after those before it; False where too many wait."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, patience_s: float) -> bool:
        """Do what waits and end; whether it was all done in time. What was not is given up."""
        deadline = time.monotonic() + patience_s
        try:
            self._jobs.put(None, timeout=patience_s)
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What MLflow is told of a run."""

    name: str
    params: Mapping[str, Any]
    tags: Mapping[str, str]
    inputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # of a data set by name: digest, where it lies
    id: str | None = None  # of the MLflow run to go on in, if the store knows it
    first: int = 0  # step at which it goes on


class Tracker:
    """One MLflow run, written from a thread of its own; metrics of each agent are `agent/<name>/<metric>`.

    It reads what it sends from metrics.jsonl. So what MLflow does not take is sent later, in this process or the next,
    and a store that was removed since is filled again. Beside that file mlflow.json says what was sent.
    """

    def __init__(
        self, uri: str, experiment: str, run: TrackedRun, journal: Path, warn: Callable[[str], None] = print
    ) -> None:
        """Begin to connect; returns at once. `warn` gets a line when MLflow fails, and when it works again."""
        # read by MLflow, which has no call for any of them; a server that hangs is given up, and asked again later
        os.environ.update(
            MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", MLFLOW_ENABLE_ASYNC_TRACE_LOGGING="false"
        )
        for name, value in (("TIMEOUT", "10"), ("MAX_RETRIES", "1")):
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
        self.uri, self._experiment, self._run, self._journal, self._warn = uri, experiment, run, journal, warn
        self.experiment_id = ""  # both, once it is connected
        self.run_id: str | None = run.id
        self.sink = Sink("mlflow")
        self._client: Any = None
        self._sent = run.first - 1  # the last step that MLflow has
        self._read = 0  # bytes of metrics.jsonl
        self._faults = 0  # since it worked
        self._again = 0.0  # when to try again
        self.log()

    def log(self) -> None:
        """Have the steps sent that metrics.jsonl has and MLflow lacks."""
        self.sink.put(self._send)

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED, if MLflow takes that in time."""
        self.sink.put(lambda: self._send(status))
        if not self.sink.close(_PATIENCE_S):
            self._warn(f"MLflow hangs: steps after {self._sent} are in {self._journal} alone")

    def _send(self, status: str | None = None) -> None:
        if time.monotonic() < self._again and status is None:
            return
        try:
            if self._client is None:
                self._connect()
            rows, read = json_lines(self._journal, self._read)
            for row in rows:
                if row["step"] > self._sent:
                    self._log_step(row)
            self._read = read
            if status is not None:
                self._client.set_terminated(self.run_id, status)
        except Exception as error:  # whatever a store may raise: no metric is worth a run
            self._faults += 1
            self._again = time.monotonic() + min(60.0, 2.0**self._faults)
            if self._faults == 1 or status is not None:
                why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._warn(f"MLflow does not take metrics ({why}); they are in {self._journal} and are sent later")
            return
        if self._faults:
            self._warn(f"MLflow works again and has all steps up to {self._sent}")
        self._faults, self._again = 0, 0.0

    def _connect(self) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        with _one_at_a_time(self.uri):  # the first client of a new sqlite store writes its tables
            client = MlflowClient(tracking_uri=self.uri)
            found = client.get_experiment_by_name(self._experiment)
            place = _beside(self.uri, self._experiment)
            experiment_id = (
                found.experiment_id if found else client.create_experiment(self._experiment, artifact_location=place)
            )
        record = self._record()
        run_id = self._run.id or (record.get("run") if self._run.first else None)
        if run_id is not None:
            try:
                client.update_run(run_id, status="RUNNING")
            except MlflowException:
                run_id = None  # the store was removed since
        if run_id is None:
            run_id = client.create_run(experiment_id, run_name=self._run.name, tags=dict(self._run.tags)).info.run_id
            self._sent = -2
            self._log_params(client, run_id)
        elif record.get("run") == run_id:
            self._sent = min(self._sent, int(record["sent"]))
        self._client, self.experiment_id, self.run_id = client, experiment_id, run_id

    def _record(self) -> dict[str, Any]:
        """What mlflow.json says, {} where it says nothing."""
        try:
            record = json.loads(self._journal.with_name("mlflow.json").read_text())
            return {"run": str(record["run"]), "sent": int(record["sent"])}
        except (OSError, ValueError, LookupError, TypeError):
            return {}

    def _log_params(self, client: Any, run_id: str) -> None:
        from mlflow.entities import Dataset, DatasetInput, Param

        data = [
            DatasetInput(Dataset(name, digest[:_DIGEST], source_type="local", source=json.dumps({"uri": where})))
            for name, (digest, where) in self._run.inputs.items()
        ]
        if data:
            client.log_inputs(run_id, datasets=data)
        rows = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in _flat(self._run.params)]
        for first in range(0, len(rows), _PARAMS_PER_CALL):
            client.log_batch(run_id, params=rows[first : first + _PARAMS_PER_CALL])

    def _log_step(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now, step = int(time.time() * 1000), row["step"]
        numbers = {key: value for key, value in row.items() if isinstance(value, float | int) and key != "step"}
        # training counts from 0, MLflow's axis from 1
        self._client.log_batch(self.run_id, metrics=[Metric(k, float(v), now, step + 1) for k, v in numbers.items()])
        self._sent = step
        write_json(self._journal.with_name("mlflow.json"), {"run": self.run_id, "sent": step})


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value))
    return rows


def _beside(uri: str, experiment: str) -> str | None:
    """Where an experiment's artifacts go: next to a local sqlite store, not where the process happens to be started."""
    path = _sqlite(uri)
    return None if path is None else str(path.absolute().parent / "mlflow-artifacts" / experiment)


def _sqlite(uri: str) -> Path | None:
    """The file of a local sqlite store, None of any other."""
    scheme, _, path = uri.partition(":///")
    return Path(path) if scheme == "sqlite" else None


class _one_at_a_time:  # noqa: N801  (used as a `with` verb)
    """Exclusive access to a local sqlite store, across processes; other stores look after themselves."""

    def __init__(self, uri: str) -> None:
        store = _sqlite(uri)
        self._path = store and store.with_name(f"{store.name}.lock")

    def __enter__(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._file.close()


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
        if not self._tracker.experiment_id or run_id is None:
            self._refuse(trajectory, "there is no connection")
            return
        import mlflow

        said = _Said()
        log = logging.getLogger(_EXPORTER)
        log.addFilter(said)
        try:
            mlflow.set_tracking_uri(self._tracker.uri)
            write_trace(trajectory, advantages, self._tracker.experiment_id, run_id)
            if picture := draw(trajectory):
                place = f"pictures/step_{trajectory.step:06d}/{file_name(trajectory)}"
                mlflow.MlflowClient(self._tracker.uri).log_text(run_id, picture, place)
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
