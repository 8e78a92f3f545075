"""Costs of a run: device hours and tokens of its training; tokens and seconds of an answer.

An answer is a completed trajectory of an evaluation.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from mcore_mas.reports.step_metrics import Metrics, read_step_rows
from rollout.base.json_files import read_record
from rollout.base.parquet import bounded_table, open_parquet
from rollout.records.files import arrow_errors

_TURN_COLUMNS = ("agent", "completion_ids.list.element", "started_s", "took_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCosts:
    """Mean costs of an answer, or of an agent's part in it."""

    calls: float
    tokens: float  # sampled tokens
    # Of an answer: from its first call to the end of its last one. Of an agent: the sum of its calls.
    seconds: float


def run_costs(run: Path, state: str) -> dict[str, str]:
    """Return a row of a table on the costs of a run; costs that were not recorded are left out.

    Args:
        run: folder of the run.
        state: name of the evaluation whose answers are counted, such as "base" or "trained".

    Raises:
        MetricsError, FolderError: as in `training_costs`.
        RecordError: a file of the evaluation's trajectories cannot be read.
    """
    row = {"experiment": run.name}
    training = training_costs(run)
    if training:
        devices = read_record(run / "train" / "done.json").get("devices")
        if devices:
            row["trained on"] = f"{devices['count']} x {devices['name']}"
            hours = training.get(f"{devices['kind'].lower()}_hours")
            if hours is not None:
                row[f"{devices['kind']} hours"] = f"{hours:.3g}"
        row["tokens sampled in training"] = f"{training['tokens']:.0f}"

    turns = _read_turns(run / "evaluation" / state)
    if len(turns):
        answer = _costs_of_answer(turns)
        row["tokens of an answer"] = f"{answer.tokens:.4g}"
        row["seconds of an answer"] = f"{answer.seconds:.3g}"
        row["calls, tokens and seconds by agent"] = "; ".join(
            f"{agent} {costs.calls:.3g} calls, {costs.tokens:.4g} tokens, {costs.seconds:.3g} s"
            for agent, costs in _costs_by_agent(turns).items()
        )
    return row


def training_costs(run: Path) -> dict[str, float]:
    """Return the sampled tokens and the device hours of a run's finished training.

    A device hour is an hour of one GPU, or of one CPU on a machine without GPUs. Only the time in
    which trajectories are collected and policies are updated counts: starting, validating and
    writing checkpoints are left out.

    Args:
        run: folder of the run.

    Returns:
        `tokens`, and `gpu_hours` or `cpu_hours` if the devices and all times were recorded; {} before
        the training has finished.

    Raises:
        MetricsError: the metrics cannot be read, or a row has no step.
        FolderError: the record of the finished training is damaged.
    """
    metrics = run / "train" / "metrics.jsonl"
    done = run / "train" / "done.json"
    if not metrics.is_file() or not done.is_file():
        return {}

    # Step -1 is the validation before training.
    steps = [row for row in read_step_rows(metrics) if row["step"] >= 0]
    costs = {"tokens": sampled_tokens(steps)}
    devices = read_record(done).get("devices")
    times_are_known = all({"time/collect_s", "time/update_s"} <= row.keys() for row in steps)
    if devices and times_are_known:
        seconds = sum(row["time/collect_s"] + row["time/update_s"] for row in steps)
        costs[f"{devices['kind'].lower()}_hours"] = devices["count"] * seconds / 3600
    return costs


def sampled_tokens(metrics: Metrics) -> float:
    """Return the number of tokens that a training sampled, including those of replays.

    A replay plays a trajectory again from one turn on, with another sampled reply or an empty one
    in place of that turn's. The tokens that it samples after this reply are counted by
    `rollout/replayed_tokens`, not by `rollout/tokens`.

    Args:
        metrics: rows of the training steps.
    """
    return float(
        sum(
            row.get("rollout/tokens", 0.0) + row.get("rollout/replayed_tokens", 0.0)
            for row in metrics
        )
    )


def answer_costs(folder: Path) -> dict[str, float]:
    """Return the mean costs of the answers of an evaluation.

    The seconds of an answer are from its first call to the end of its last call. Those of an agent
    are the sum over its calls.

    Args:
        folder: folder of the evaluation's trajectories.

    Returns:
        `tokens` and `seconds`, and `agent/NAME/calls`, `agent/NAME/tokens` and `agent/NAME/seconds`
        of each agent; {} if no completed trajectory is recorded.

    Raises:
        RecordError: a file of trajectories cannot be read.
    """
    turns = _read_turns(folder)
    if not len(turns):
        return {}
    answer = _costs_of_answer(turns)
    costs = {"tokens": answer.tokens, "seconds": answer.seconds}
    for agent, agent_costs in _costs_by_agent(turns).items():
        costs[f"agent/{agent}/calls"] = agent_costs.calls
        costs[f"agent/{agent}/tokens"] = agent_costs.tokens
        costs[f"agent/{agent}/seconds"] = agent_costs.seconds
    return costs


def _costs_of_answer(turns: pd.DataFrame) -> AnswerCosts:
    """Return the mean costs of an answer, from the turns of all answers."""
    answers = turns.groupby("answer")
    seconds = (answers["ended"].max() - answers["started"].min()).mean()
    return AnswerCosts(
        calls=len(turns) / len(answers),
        tokens=float(turns["tokens"].sum() / len(answers)),
        seconds=float(seconds),
    )


def _costs_by_agent(turns: pd.DataFrame) -> dict[str, AnswerCosts]:
    """Return the mean costs of each agent's part in an answer; answers without the agent count too."""
    answers = turns["answer"].nunique()
    return {
        str(agent): AnswerCosts(
            calls=float(len(agent_turns)) / answers,
            tokens=float(agent_turns["tokens"].sum()) / answers,
            seconds=float(agent_turns["took"].sum()) / answers,
        )
        for agent, agent_turns in turns.groupby("agent", sort=False)
    }


def _read_turns(folder: Path) -> pd.DataFrame:
    """Return a row for each turn of the completed trajectories of an evaluation.

    The columns are answer (an id of the turn's trajectory), agent, tokens (number of sampled tokens),
    started, ended (Unix times in seconds) and took (seconds). Without files there are no columns.
    """
    shards = sorted(folder.glob("part_*.parquet"))
    parts = [_read_shard(path, number) for number, path in enumerate(shards)]
    return pd.concat(parts) if parts else pd.DataFrame()


def _read_shard(path: Path, number: int) -> pd.DataFrame:
    """Return the rows of `_read_turns` for the trajectories of one file.

    Args:
        path: file of trajectories.
        number: number of the file, which makes the ids of its answers differ from those of other
            files.
    """
    columns = ["status", *(f"turns.list.element.{name}" for name in _TURN_COLUMNS)]
    with (
        arrow_errors(path, "not a readable file of trajectories", "; evaluate the run again"),
        open_parquet(path) as file,
    ):
        table = bounded_table(file, columns)
    completed = table.filter(pc.equal(table["status"], "completed"))
    turn_lists = completed["turns"].combine_chunks()
    turns = pc.list_flatten(turn_lists)

    def column(name: str) -> pa.Array:
        return pc.struct_field(turns, name)

    trajectory_of_turn = pc.list_parent_indices(turn_lists).to_pylist()
    values: dict[str, Any] = {
        "answer": [f"{number}/{index}" for index in trajectory_of_turn],
        "agent": column("agent").to_pandas(),
        "tokens": pc.list_value_length(column("completion_ids")).to_pandas(),
        "started": column("started_s").to_pandas(),
        "took": column("took_s").to_pandas(),
        "ended": pc.add(column("started_s"), column("took_s")).to_pandas(),
    }
    return pd.DataFrame(values)
