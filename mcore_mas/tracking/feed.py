"""Metric tracking in MLflow: a run's metrics.jsonl, sent from a thread of its own.

MLflow may be slow, broken or gone: nothing waits for it. What was sent and not confirmed is sent again with the same
time, by which MLflow's database knows it: each value is there once.
"""

import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from mcore_mas import code_commit
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.slurm import machines_here, slurm_job
from mcore_mas.tracking.store import PARENT, MetricRow, Store, key_of, metric_name, one_line
from rollout.base.files import json_lines, read_json, sha256, write_json
from rollout.base.options import leaves
from rollout.records.files import read_tasks, tasks_digest

CLOCK = "time/unix_s"  # in metrics.jsonl: when the step ended; no metric
EPOCH = "epoch"  # there: of the owner who wrote the row
NO_METRICS = frozenset({"step", CLOCK, EPOCH})
_KEY = {
    "reward/mean": "0_key/reward",
    "validation/accuracy": "0_key/validation_accuracy",
}  # MLflow sorts by name

_LONGEST_PARAM = 500  # characters; MLflow refuses more than 6000
_PARAMS_PER_CALL = 100  # MLflow's limit
_METRICS_TOGETHER = 500  # of several steps, in one call
_PATIENCE_S = 30.0  # at the end of a run, for a tracker to take what is left
_EVERY_S = 2.0  # at most, what a tracker lacks is sent to it: a call takes 20 ms of a core, some steps not many more
_FIRST_S = 1.0  # half of the pause after a first fault


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


class Feed:
    """What metrics.jsonl has, for a tracker, from a thread of its own: whatever the tracker does, nothing waits for it.

    What it does not take is sent once it works again, in this process or another; it is asked after longer and longer
    pauses, of a minute at most.
    """

    def __init__(self, whom: str, journal: Path, warn: Callable[[str], None], sent: int) -> None:
        """`sent` is the last step that it has; `warn` gets a line when it fails, and when it works again."""
        self.sink = Sink(whom)
        self._whom, self._journal, self._warn, self._sent = whom, journal, warn, sent
        self._read = 0  # bytes of metrics.jsonl
        self._faults, self._again = 0, 0.0  # since it worked; when to try again
        self._due, self._asked, self._ends = (
            0.0,
            False,
            threading.Event(),
        )  # when next; whether somebody waits for it

    def log(self) -> None:
        """Have the steps sent soon that metrics.jsonl has and the tracker lacks; returns at once."""
        if not self._asked:
            self._asked = True
            if not self.sink.put(self._try):
                self._asked = False

    def finish(self, status: str) -> bool:
        """Close the run as FINISHED, FAILED or KILLED; whether the tracker has taken all, in time."""
        self._ends.set()
        self.sink.put(lambda: self._try(status))
        done = self.sink.close(_PATIENCE_S)
        if not done:
            self._warn(
                f"{self._whom} hangs: steps from {self._sent + 1} on are in {self._journal} alone"
            )
        return done and not self._faults

    def _try(self, status: str | None = None) -> None:
        self._ends.wait(self._due - time.monotonic())
        self._asked = False
        if time.monotonic() < self._again and status is None:
            return
        try:
            self._send(status)
        except Exception as error:  # whatever foreign code may raise: no metric is worth a run
            self._faults += 1
            self._again = time.monotonic() + min(60.0, _FIRST_S * 2.0**self._faults)
            if self._faults == 1 or status is not None:
                why = f"does not take metrics ({one_line(error)})"
                self._warn(f"{self._whom} {why}; {self._journal} has them for later")
            return
        if self._faults:
            self._warn(f"{self._whom} works again and has all steps up to {self._sent}")
        self._faults, self._again, self._due = 0, 0.0, time.monotonic() + _EVERY_S

    def _send(self, status: str | None) -> None:
        """Send what the tracker lacks, and with a `status` close the run."""
        raise NotImplementedError


class Tracker(Feed):
    """The MLflow run of a training; metrics of each agent are `agent/<name>/<metric>`.

    A store that was removed since is filled again. Beside metrics.jsonl, mlflow.json says what was sent.
    """

    def __init__(
        self,
        config: RunConfig,
        config_path: Path,
        first: int,
        run_id: str | None,
        warn: Callable[[str], None],
        *,
        ended: bool = False,
    ) -> None:
        """Begin to connect; returns at once.

        Args:
            first: step at which the training goes on.
            run_id: of the run to go on in, if the store knows it.
            ended: it has ended, and another process sends what MLflow lacks of it; tags that its own wrote down hold.
        """
        self.store, self._config, self._first, self._ended = store_of(config), config, first, ended
        self._inputs = inputs_of(config, "train", "validation")
        journal = config.folder / "train" / "metrics.jsonl"
        self._before = _read_record(journal)
        written = self._before.get("tags", {})
        tags = {
            "stage": "train",
            **tags_of(config, config_path, self._inputs),
            **({} if ended else made_here()),
        }
        # at its start once more, of the same code and config: it ended before its first checkpoint
        again = bool(written) and all(
            written.get(name) == tags.get(name) for name in ("config_sha256", "commit")
        )
        self._known = [
            known
            for known in (run_id, self._before.get("run") if first or again else None)
            if known
        ]
        self._tags = written if ended and written else _also(tags, written if self._known else {})
        self.run_id: str | None = next(iter(self._known), None)
        self._key = uuid.uuid4().hex  # of a run that is to be made
        self._connected = False
        self._left: dict[str, int] = {}  # step at which a metric, held back until then, left zero
        self._last = time.time()  # when the last step ended
        super().__init__("MLflow", journal, warn, self._had(self.run_id))
        self.log()

    def _send(self, status: str | None) -> None:
        if not self._connected:
            self._connect()
        rows, read = json_lines(self._journal, self._read)
        self._log_rows(rows)
        self._read = read
        if status is not None:
            self.store.client.set_terminated(self.run_id, status, int(self._last * 1000))

    def _had(self, run_id: str | None) -> int:
        """The last step that MLflow has of a run, as far as it is written down."""
        same = run_id is not None and run_id == self._before.get("run")
        return int(self._before["sent"]) if same else self._first - 1

    def _connect(self) -> None:
        store = self.store
        self._save()  # the tags too wait there
        store.connect()
        run_id = next((run_id for run_id in self._known if store.knows(run_id)), None)
        parent = store.parent(self._config)
        if run_id is None:
            first = next(iter(json_lines(self._journal)[0]), {})
            # two processes may send what is left of one that has ended
            key = key_of(self._journal, str(first.get(CLOCK))) if self._ended else self._key
            run_id = store.run(
                key, f"{self._config.run} train", self._tags, parent, first.get(CLOCK)
            )
            self._sent = -2
            self._log_params(run_id)
        else:
            self._sent = self._had(run_id)
            store.client.update_run(run_id, status="RUNNING")
            store.tag(run_id, {**self._tags, PARENT: parent})
        store.inputs(run_id, self._inputs)
        self._connected, self.run_id = True, run_id

    def _save(self) -> None:
        record = {"run": self.run_id, "sent": self._sent, "tags": dict(self._tags)}
        write_json(self._journal.with_name("mlflow.json"), record)

    def _log_params(self, run_id: str) -> None:
        param = self.store.entities.Param
        params = leaves(self._config.model_dump(mode="json"))
        rows = [param(metric_name(key), str(value)[:_LONGEST_PARAM]) for key, value in params]
        with self.store.alone():  # MLflow takes the same twice, but not at once
            for first in range(0, len(rows), _PARAMS_PER_CALL):
                self.store.client.log_batch(run_id, params=rows[first : first + _PARAMS_PER_CALL])

    def _log_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send what MLflow lacks of these steps, in as few calls as it allows; after a fault step by step.

        A slow server may have no time for more in one call, which would be made again for ever.
        """
        most = 0 if self._faults else _METRICS_TOGETHER
        waiting: list[MetricRow] = []
        # of a version that wrote no times; two processes have to send the same one
        written = self._journal.stat().st_mtime if rows else 0.0
        history = cache(lambda: json_lines(self._journal)[0])
        for number, row in enumerate(rows):
            self._last = row.get(CLOCK, written)
            metrics = [
                (name, float(value), self._last, row["step"])
                for name, value in [
                    *row.items(),
                    *((_KEY[key], row[key]) for key in _KEY if key in row),
                ]
                if isinstance(value, float | int) and name not in NO_METRICS
            ]
            released = metrics if self._config.tracking.zeros else self._released(metrics, history)
            waiting += [metric for metric in released if row["step"] > self._sent]
            if row["step"] > self._sent and (len(waiting) > most or number + 1 == len(rows)):
                self.store.metrics(self.run_id or "", waiting)
                self._sent, waiting = row["step"], []
                self._save()

    def _released(
        self, metrics: Sequence[MetricRow], history: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> list[MetricRow]:
        """Of a step's metrics those to send: with the first that is not zero, the zeros before it in `history`.

        Told of a step again, it gives the same again.
        """
        found: list[MetricRow] = []
        for metric in metrics:
            name, value, at, step = metric
            left = self._left.get(name, step)
            if value == 0 and name not in _KEY and name not in _KEY.values() and step <= left:
                continue
            if value != 0 and step <= left:
                self._left[name] = step
                zeros = (row for row in history() if row.get(name) == 0 and row["step"] < step)
                found += [(name, 0.0, row.get(CLOCK, at), row["step"]) for row in zeros]
            found.append(metric)
        return found


def _also(tags: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """`tags`, with jobs and machines that the run had before in front of those of now."""
    had = {
        name: [*before.get(name, "").split(), tags[name]]
        for name in ("slurm_job", "machines")
        if name in tags
    }
    return {**tags, **{name: " ".join(dict.fromkeys(values)) for name, values in had.items()}}


def _read_record(journal: Path) -> dict[str, Any]:
    """What mlflow.json beside it says, {} where it says nothing."""
    try:
        record = json.loads(journal.with_name("mlflow.json").read_text(encoding="utf-8"))
        return {
            "run": record["run"],
            "sent": int(record["sent"]),
            "tags": dict(record.get("tags", {})),
        }
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def store_of(config: RunConfig) -> Store:
    """Where a run's config has it tracked."""
    return Store(config.tracking.uri, config.tracking.experiment, config.results)


def tags_of(
    config: RunConfig, config_path: Path, inputs: Mapping[str, tuple[str, str]]
) -> dict[str, str]:
    """What runs are looked up and compared by; digests of the data `inputs` among them."""
    tags = {
        **config.tracking.tags,
        "run": config.run,
        "seed": str(config.seed),
        "results": str(config.results),
    }
    tags["config_sha256"] = sha256(config_path)
    tags |= {f"model.{policy}": str(model) for policy, model in config.models.items()}
    return tags | {
        f"data.{name.rpartition('/')[2]}": digest for name, (digest, _) in inputs.items()
    }


def made_here() -> dict[str, str]:
    """The code that this process runs, on which machines and, if it is in one, its job of Slurm, as tags."""
    job = slurm_job()
    return {"commit": code_commit(), "machines": machines_here()} | (
        {"slurm_job": job} if job else {}
    )


@contextmanager
def noted(log: Path | str) -> Iterator[None]:
    """Note when the stage with this log began and ended, and where it ran, for MLflow; one with several tries once."""
    note = Path(log).with_suffix(".json")
    before = read_json(note) if note.is_file() else {}
    record = {"began": time.time(), "tags": made_here()}
    if before and "ended" not in before:
        record = {"began": before["began"], "tags": _also(made_here(), before["tags"])}
    write_json(note, record)
    yield
    write_json(note, {**record, "ended": time.time()})


def inputs_of(config: RunConfig, *splits: str) -> dict[str, tuple[str, str]]:
    """The run's tasks by name: their digest and their file, of which MLflow gets no copy."""
    files = {split: config.folder / "tasks" / f"{split}.parquet" for split in splits}
    return {
        f"{config.run}/{split}": (tasks_digest(read_tasks(file)), str(file.absolute()))
        for split, file in files.items()
        if file.is_file()
    }
