"""What MLflow lacks of finished runs, from their folders: steps, evaluations, costs, tables; each is there once."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.reports.costs import answer_costs, training_costs
from mcore_mas.tracking.feed import Sink, Tracker, inputs_of, store_of, tags_of
from mcore_mas.tracking.store import Store, key_of, one_line
from rollout.base.files import read_json, read_record, sha256
from rollout.tasks.splits import SPLITS

LOCAL_PAGES = "http://127.0.0.1:5000"  # of a local store, by `make ui`
_PATIENCE_S = 30.0  # at the end of an evaluation, or for a run of a report


def publish_evaluated(config_path: Path, warn: Callable[[str], None] = print) -> None:
    """Send MLflow what it lacks of a run that was evaluated; after 30 s that is left to the report, or `track`."""
    config = RunConfig.load(config_path)
    publish_in_time(config.results, [config.run], [], warn, means=False)


def publish_in_time(
    results: Path,
    runs: Collection[str],
    tables: Iterable[str],
    warn: Callable[[str], None] = print,
    **options: bool,
) -> str | None:
    """As `publish`, for 30 s for each run at most; what is not sent by then is left to `mcore-mas track`."""
    sink, links = Sink("mlflow"), list[str | None]()
    sink.put(lambda: links.append(publish(results, runs, tables, warn, **options)))
    if not sink.close(_PATIENCE_S * len(runs)):
        warn(f"MLflow hangs; `mcore-mas track {results}` sends it the scores later")
    return next(iter(links), None)


def publish(
    results: Path,
    runs: Iterable[str],
    tables: Iterable[str],
    warn: Callable[[str], None] = print,
    *,
    means: bool = True,
) -> str | None:
    """Send MLflow what it lacks of those `runs` that have finished, and `tables` with their charts as artifacts.

    It gives up where the store fails, and tells `warn`: the next call sends the rest. Any number may do so at once.

    Args:
        means: send each experiment's means too, which are over its seeds among `runs`.

    Returns:
        The address of MLflow's page that compares the trainings; None where the store failed, or none has finished.
    """
    stores: dict[tuple[str, str], Store] = {}
    trained: dict[Store, list[str]] = defaultdict(list)
    scores: dict[tuple[Store, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    newest = 0.0  # when the last evaluation was written: of two values MLflow shows the later one
    try:
        for path in (results / run / "config.yaml" for run in runs):
            try:
                config = RunConfig.load(path)
            except ConfigError as error:  # of another version; the others are sent
                warn(f"MLflow gets nothing of this run: {one_line(error)}")
                continue
            store = store_of(config)
            store = stores.setdefault((store.uri, store.experiment), store)
            store.connect()
            parent = store.parent(config)
            run_id, models = _training(store, config, path, warn)
            trained[store] += [run_id] if run_id else []
            _stages(store, config, path, parent)
            for file in sorted((config.folder / "evaluation").glob("*.json")):
                newest = max(newest, file.stat().st_mtime)
                played = models if file.stem == "trained" else []
                for name, value in _evaluation(store, config, path, file, parent, played).items():
                    scores[store, parent][name].append(value)
        for (store, parent), own in scores.items() if means else ():
            store.metrics(
                parent, [(name, fmean(values), newest, -1) for name, values in own.items()]
            )
        for store in list(stores.values())[:1]:
            for name in tables:
                _artifacts(store, results, name)
    except (
        Exception
    ) as error:  # whatever a store may raise: the files are there, and are sent another time
        warn(
            f"MLflow does not take results ({one_line(error)}); `mcore-mas track {results}` sends them later"
        )
        return None
    return next((compare_url(store, ids) for store, ids in trained.items()), None)


def compare_url(store: Store, run_ids: Sequence[str]) -> str:
    """The address of MLflow's page on these runs side by side."""
    pages = store.uri.rstrip("/") if store.uri.startswith("http") else LOCAL_PAGES
    ids, experiments = (quote(json.dumps(list(own))) for own in (run_ids, [store.experiment_id]))
    return f"{pages}/#/compare-runs?runs={ids}&experiments={experiments}"


def _training(
    store: Store, config: RunConfig, path: Path, warn: Callable[[str], None]
) -> tuple[str | None, list[str]]:
    """(Run, models) that MLflow has of a finished training, with all of its steps, its costs and its folders."""
    done = config.folder / "train" / "done.json"
    if not done.is_file():
        return None, []
    written = read_record(done, "policies")
    tracker = Tracker(
        config, path, config.trainer.steps, written.get("mlflow_run"), warn, ended=True
    )
    if not tracker.finish("FINISHED") or tracker.run_id is None:
        raise RuntimeError(f"the steps of {config.run} are not all there")  # it has said why
    at, last = done.stat().st_mtime, config.trainer.steps - 1
    store.metrics(
        tracker.run_id,
        [
            (f"cost/{name}", value, at, last)
            for name, value in training_costs(config.folder).items()
        ],
    )
    store.tag(
        tracker.run_id,
        {f"trained.{policy}": str(model) for policy, model in written["policies"].items()},
    )
    return tracker.run_id, store.models(tracker.run_id, written["policies"])


def _evaluation(
    store: Store, config: RunConfig, path: Path, file: Path, parent: str, models: Sequence[str]
) -> dict[str, float]:
    """Have an evaluation's scores and costs sent, if they are not; the scores, by state, metric and data source."""
    found = read_record(file, "rows")
    scores = {f"{row['metric']}/{row['dataset']}": row["value"] for row in found["rows"]}
    inputs = inputs_of(config, "test")
    tags = tags_of(config, path, inputs) | {
        "stage": "evaluate",
        "state": file.stem,
        "k": str(found["k"]),
    }
    note, at = _there(config.folder / "logs" / f"evaluate_{file.stem}.json"), file.stat().st_mtime
    tags |= note.get("tags", {})
    run_id = store.run(
        key_of(file), f"{config.run} evaluate {file.stem}", tags, parent, note.get("began", at)
    )
    numbers = {f"replies/{name}": float(found[name]) for name in ("replies", "overlong", "cut")}
    numbers |= scores | {"replies/failed": float(sum(found["failed"].values()))}
    _sent(store, run_id, file, at, _answers(file, numbers), inputs, models)
    return {f"{file.stem}/{name}": value for name, value in scores.items()}


def _answers(file: Path, numbers: Mapping[str, float]) -> Iterator[tuple[str, float, int]]:
    """`numbers`, and what answers of the evaluation have cost, which takes time to read."""
    costs = answer_costs(file.with_suffix(""))
    of_agents = {
        name if name.startswith("agent/") else f"answer/{name}": value
        for name, value in costs.items()
    }
    yield from ((name, value, -1) for name, value in {**numbers, **of_agents}.items())


# what says how well a stage did
_FOUND = {
    "bootstrap": "bootstrap/bootstrap.json",
    "build_index": "index/index.json",
    "probe_retriever": "retriever.json",
}


def _stages(store: Store, config: RunConfig, path: Path, parent: str) -> None:
    """Have each of the run's jobs before its training sent that has ended, with what it measured, if it was not."""
    inputs = inputs_of(config, *SPLITS)
    for file in sorted((config.folder / "logs").glob("*.json")):
        stage, note = re.sub(r"_\d.*", "", file.stem), _there(file)
        if stage.startswith("evaluate_") or "ended" not in note:
            continue
        tags = {**tags_of(config, path, inputs), **note["tags"], "stage": stage}
        run_id = store.run(key_of(file), f"{config.run} {file.stem}", tags, parent, note["began"])
        found = _there(config.folder / _FOUND[stage]) if stage in _FOUND else {}
        numbers = [
            (name, float(value), int(row["step"]) - 1)
            for row in found.get("history", [{**found, "step": 0}])
            for name, value in row.items()
            if type(value) in (float, int) and name != "step"
        ]
        _sent(store, run_id, file, note["ended"], numbers, inputs)


def _sent(
    store: Store,
    run_id: str,
    file: Path,
    at: float,
    numbers: Iterable[tuple[str, float, int]],
    inputs: Mapping[str, tuple[str, str]],
    models: Sequence[str] = (),
) -> None:
    """Have (name, value, step) and `inputs` sent to a run that ended with `file`, and it closed, if it was not yet."""
    digest = sha256(file)
    if store.client.get_run(run_id).data.tags.get("sha256") != digest:
        store.metrics(run_id, [(name, value, at, step) for name, value, step in numbers])
        store.inputs(run_id, inputs, models)
        store.client.set_terminated(run_id, "FINISHED", int(at * 1000))
        store.tag(run_id, {"sha256": digest})


def _there(path: Path) -> dict[str, Any]:
    """The content of a JSON file, {} where there is none."""
    return read_json(path) if path.is_file() else {}


def _artifacts(store: Store, results: Path, name: str) -> None:
    """Have a table and its page of charts sent, if they are there and were not sent as they are."""
    paths = sorted(
        [*results.glob(f"tables/{name}.[cmh]*"), *results.glob(f"figures/{name}/*.html")]
    )
    if not paths:
        return
    run_id = store.run(
        key_of(results, "tables", name), name, {"stage": "report", "suite": name, "table": name}
    )
    digest = sha256(*paths)
    if store.client.get_run(run_id).data.tags.get("sha256") != digest:
        for path in paths:
            store.client.log_artifact(run_id, str(path))
        store.client.set_terminated(run_id, "FINISHED")
        store.tag(run_id, {"sha256": digest})
