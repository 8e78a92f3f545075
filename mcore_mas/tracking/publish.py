"""Send MLflow the steps, scores, costs and tables of runs; sending them again changes nothing."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.reports.costs import answer_costs, training_costs
from mcore_mas.reports.step_metrics import read_step_rows
from mcore_mas.tracking.mlflow_store import MetricPoint, MlflowStore, open_store, run_key
from mcore_mas.tracking.mlflow_training import MlflowWriter, load_training_record
from mcore_mas.tracking.run_tags import config_tags
from mcore_mas.tracking.sender import short_error, write_rows
from rollout.base.digests import sha256
from rollout.base.json_files import read_json, read_record
from rollout.base.ownership import FolderError, is_owned
from rollout.tasks.splits import SPLITS

LOCAL_PAGES = "http://127.0.0.1:5000"  # address at which `make ui` serves a local store
SECONDS_PER_RUN = 30.0  # for which a job waits for MLflow
_DIGEST_TAG = "sha256"  # tag with the digest of the file that a run of MLflow was made from
# Errors of reading damaged files of a run. MLflow's own errors are of other types.
_DAMAGE = (FolderError, LookupError, TypeError, ValueError, AttributeError)
# Files with the measurements of stages.
_STAGE_RESULTS = {
    "bootstrap": "bootstrap/bootstrap.json",
    "build_index": "index/index.json",
    "probe_retriever": "retriever.json",
}


def publish_evaluation(config_path: Path, warn: Callable[[str], None] = print) -> None:
    """Send MLflow the results that it lacks of a run, for at most 30 seconds; leave means out."""
    config = RunConfig.load(config_path)
    publish_within_limit(config.results, [config.run], tables=[], warn=warn, means=False)


def publish_within_limit(
    results: Path,
    runs: Collection[str],
    tables: Collection[str],
    warn: Callable[[str], None] = print,
    *,
    means: bool = True,
) -> str | None:
    """Call `publish`, but give up after 30 seconds per run; `mcore-mas track` sends the rest."""
    links: list[str | None] = []

    def publish_runs() -> None:
        links.append(publish(results, runs, tables, warn, means=means))

    thread = threading.Thread(target=publish_runs, name="publish", daemon=True)
    thread.start()
    thread.join(SECONDS_PER_RUN * len(runs))
    if thread.is_alive():
        warn(f"MLflow does not answer; `mcore-mas track {results}` sends the results later")
        return None
    return links[0]


def publish(
    results: Path,
    runs: Iterable[str],
    tables: Iterable[str],
    warn: Callable[[str], None] = print,
    *,
    means: bool = True,
) -> str | None:
    """Send MLflow everything that it lacks of runs, and tables with their charts.

    Runs may have finished or not. A damaged file of a run gives a warning, and the other runs are
    sent. The first error of MLflow ends the call with a warning, and the next call sends the rest.
    Several processes may call it at once.

    Args:
        results: folder of the runs.
        runs: their names.
        tables: names of files in `results`/tables, without suffix.
        means: also send the mean scores of each experiment over those of its seeds that are among
            `runs`.

    Returns:
        Address of the page that compares the finished trainings; None after an error, or if
        none has finished.
    """
    publisher = _Publisher(warn)
    try:
        for run in runs:
            try:
                publisher.send_run(results / run / "config.yaml")
            except _DAMAGE as error:
                warn(f"run {run} is not sent to MLflow completely: {short_error(error)}")
        if means:
            publisher.send_means()
        for table in tables:
            publisher.send_table(results, table)
    except Exception as error:  # MLflow and its stores raise errors of any type
        warn(
            f"MLflow does not take results ({short_error(error)}); "
            f"`mcore-mas track {results}` sends them later"
        )
        return None
    return publisher.comparison_page()


class _Publisher:
    """Sends runs to the MLflow stores that their configs name."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._stores: dict[tuple[str, str], MlflowStore] = {}
        # Ids of the MLflow runs of finished trainings.
        self._trainings: dict[MlflowStore, list[str]] = defaultdict(list)
        # Scores of all seeds, by store and parent run, then by metric.
        self._scores: dict[tuple[MlflowStore, str], dict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._last_evaluation_time = 0.0  # when the newest evaluation was written, in Unix time

    def send_run(self, config_path: Path) -> None:
        """Send a run's stages, training and evaluations; warn if its config is refused."""
        try:
            config = RunConfig.load(config_path)
        except ConfigError as error:
            self._warn(f"a run is not sent to MLflow: {short_error(error)}")
            return
        store = self._store_of(config)
        parent = store.find_or_create_parent(config)
        self._send_training(store, config, config_path)
        for record_path in sorted((config.folder / "logs").glob("*.json")):
            _send_stage(store, config, config_path, record_path, parent)
        for scores_path in sorted((config.folder / "evaluation").glob("*.json")):
            scores = _send_evaluation(store, config, config_path, scores_path, parent)
            self._last_evaluation_time = max(
                self._last_evaluation_time, scores_path.stat().st_mtime
            )
            for name, value in scores.items():
                self._scores[store, parent][f"{scores_path.stem}/{name}"].append(value)

    def send_means(self) -> None:
        """Send the mean scores of each experiment's seeds to its parent run."""
        for (store, parent), scores in self._scores.items():
            points = [
                MetricPoint(name=name, value=fmean(values), time=self._last_evaluation_time, step=0)
                for name, values in scores.items()
            ]
            store.log_metrics(parent, points)

    def send_table(self, results: Path, table: str) -> None:
        """Send a table and its pages of charts to the first store as artifacts, unless it has them."""
        files = [results / f"tables/{table}.{suffix}" for suffix in ("csv", "md", "html")]
        pages = results.glob(f"figures/{table}/*.html")
        paths = sorted([*(file for file in files if file.is_file()), *pages])
        store = next(iter(self._stores.values()), None)
        if not paths or store is None:
            return
        run = store.find_or_create_run(
            run_key(results, "tables", table),
            name=table,
            tags={"stage": "report", "suite": table, "table": table},
        )
        run_id = run.info.run_id
        digest = sha256(*paths)
        if run.data.tags.get(_DIGEST_TAG) == digest:
            return
        for path in paths:
            store.client.log_artifact(run_id, str(path))
        store.client.set_terminated(run_id, "FINISHED")
        store.set_tags(run_id, {_DIGEST_TAG: digest})

    def comparison_page(self) -> str | None:
        """Return the address of MLflow's page that compares the finished trainings of the first store."""
        for store, run_ids in self._trainings.items():
            return comparison_url(store, run_ids)
        return None

    def _store_of(self, config: RunConfig) -> MlflowStore:
        key = (config.tracking.uri, config.tracking.experiment)
        if key not in self._stores:
            self._stores[key] = open_store(config)
        return self._stores[key]

    def _send_training(self, store: MlflowStore, config: RunConfig, config_path: Path) -> None:
        """Send the steps of a training; if it has finished, also its costs, and the paths of its models as tags.

        The MLflow run of a finished training ends as FINISHED. That of an unfinished one ends as KILLED if
        no process trains it any more, and otherwise stays open.
        """
        folder = config.folder / "train"
        metrics_path = folder / "metrics.jsonl"
        rows = read_step_rows(metrics_path) if metrics_path.is_file() else []
        if not rows:
            return
        writer = MlflowWriter(store, config, load_training_record(config, config_path, rows))
        write_rows(writer, rows)

        done_path = folder / "done.json"
        if done_path.is_file():
            writer.close("FINISHED")
            done_time = done_path.stat().st_mtime
            costs = [
                MetricPoint(
                    name=f"cost/{name}", value=value, time=done_time, step=config.trainer.steps
                )
                for name, value in training_costs(config.folder).items()
            ]
            store.log_metrics(writer.run_id, costs)
            models = read_record(done_path, "policies")["policies"]
            tags = {f"trained.{policy}": str(model) for policy, model in models.items()}
            store.set_tags(writer.run_id, tags)
            self._trainings[store].append(writer.run_id)
        elif not is_owned(folder):
            writer.close("KILLED")


def comparison_url(store: MlflowStore, run_ids: Iterable[str]) -> str:
    """Return the address of MLflow's page that shows these runs side by side."""
    pages = store.uri.rstrip("/") if store.uri.startswith("http") else LOCAL_PAGES
    runs = quote(json.dumps(list(run_ids)))
    experiments = quote(json.dumps([store.experiment_id]))
    return f"{pages}/#/compare-runs?runs={runs}&experiments={experiments}"


def _send_stage(
    store: MlflowStore, config: RunConfig, config_path: Path, record_path: Path, parent: str
) -> None:
    """Send a stage that has ended, with its measurements, unless MLflow has it."""
    # encode_shard_0001-of-0002 is a shard of the stage encode_shard.
    stage = re.sub(r"_\d.*", "", record_path.stem)
    record = read_json(record_path)
    if stage.startswith("evaluate_") or "ended" not in record:
        return
    tags = {**config_tags(config, config_path, SPLITS), **record["tags"], "stage": stage}
    run = store.find_or_create_run(
        run_key(record_path),
        name=f"{config.run} {record_path.stem}",
        tags=tags,
        parent=parent,
        start_time=record["began"],
    )
    digest = sha256(record_path)
    if run.data.tags.get(_DIGEST_TAG) == digest:
        return

    if stage in _STAGE_RESULTS:
        results_path = config.folder / _STAGE_RESULTS[stage]
        store.log_metrics(run.info.run_id, _stage_points(results_path, record["ended"]))
    store.end_run(run.info.run_id, "FINISHED", record["ended"])
    store.set_tags(run.info.run_id, {_DIGEST_TAG: digest})


def _stage_points(results_path: Path, time: float) -> list[MetricPoint]:
    """Return the measurements in a stage's file of results, none if there is no such file.

    A cold start has a history of measurements by step. Those of other stages are at step 0.
    """
    if not results_path.is_file():
        return []
    results = read_json(results_path)
    points = []
    for row in results.get("history", [{**results, "step": 0}]):
        for name, value in row.items():
            if type(value) in (float, int) and name != "step":
                points.append(
                    MetricPoint(name=name, value=float(value), time=time, step=int(row["step"]))
                )
    return points


def _send_evaluation(
    store: MlflowStore, config: RunConfig, config_path: Path, scores_path: Path, parent: str
) -> dict[str, float]:
    """Send an evaluation's scores and costs, unless MLflow has them.

    Returns:
        Scores by metric/data source.
    """
    state = scores_path.stem
    evaluation = read_record(scores_path, "rows")
    scores = {f"{row['metric']}/{row['dataset']}": row["value"] for row in evaluation["rows"]}
    scores_time = scores_path.stat().st_mtime
    record_path = config.folder / "logs" / f"evaluate_{state}.json"
    record = read_json(record_path) if record_path.is_file() else {}
    run = store.find_or_create_run(
        run_key(scores_path),
        name=f"{config.run} evaluate {state}",
        tags={
            **config_tags(config, config_path, ["test"]),
            **record.get("tags", {}),
            "stage": "evaluate",
            "state": state,
            "k": str(evaluation["k"]),
        },
        parent=parent,
        start_time=record.get("began", scores_time),
    )
    digest = sha256(scores_path)
    if run.data.tags.get(_DIGEST_TAG) != digest:
        metrics = scores | _reply_counts(evaluation) | _answer_costs(scores_path.with_suffix(""))
        points = [
            MetricPoint(name=name, value=value, time=scores_time, step=0)
            for name, value in metrics.items()
        ]
        store.log_metrics(run.info.run_id, points)
        store.end_run(run.info.run_id, "FINISHED", scores_time)
        store.set_tags(run.info.run_id, {_DIGEST_TAG: digest})
    return scores


def _reply_counts(evaluation: dict[str, Any]) -> dict[str, float]:
    counts = {f"replies/{name}": float(evaluation[name]) for name in ("replies", "overlong", "cut")}
    counts["replies/failed"] = float(sum(evaluation["failed"].values()))
    return counts


def _answer_costs(folder: Path) -> dict[str, float]:
    """Return the costs of an answer, as answer/NAME, and those of agents, as agent/AGENT/NAME."""
    return {
        name if name.startswith("agent/") else f"answer/{name}": value
        for name, value in answer_costs(folder).items()
    }
