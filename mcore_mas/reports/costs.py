"""What a run cost: device hours and tokens of its training, tokens and seconds of an answer, by agent too."""

from pathlib import Path

import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollout.base.json_files import read_json_lines, read_record
from rollout.base.parquet import bounded_table

_OF_TURNS = ("agent", "completion_ids.list.element", "started_s", "took_s")


def run_costs(run: Path, state: str) -> dict[str, str]:
    """A line of a table on the run in the folder `run` and its evaluation in `state`; without what was not recorded."""
    found, costs, answer = (
        {"experiment": run.name},
        training_costs(run),
        answer_costs(run / "evaluation" / state),
    )
    devices = read_record(run / "train" / "done.json").get("devices") if costs else None
    if devices:
        found["trained on"] = f"{devices['count']} x {devices['name']}"
        kind = devices["kind"]
        found[f"{kind} hours"] = f"{costs[f'{kind.lower()}_hours']:.3g}"
    if costs:
        found["tokens sampled in training"] = f"{costs['tokens']:.0f}"
    if not answer:
        return found
    agents = [name.removesuffix("/calls") for name in answer if name.endswith("/calls")]
    by_agent = [
        f"{agent.removeprefix('agent/')} {answer[f'{agent}/calls']:.3g} calls, {answer[f'{agent}/tokens']:.4g} tokens, "
        f"{answer[f'{agent}/seconds']:.3g} s"
        for agent in agents
    ]
    return found | {
        "tokens of an answer": f"{answer['tokens']:.4g}",
        "seconds of an answer": f"{answer['seconds']:.3g}",
        "of which by agent": "; ".join(by_agent),
    }


def training_costs(run: Path) -> dict[str, float]:
    """`tokens` sampled and `gpu_hours`, or `cpu_hours`, of the finished training of a run; {} before it has finished.

    A device hour is an hour of one GPU, or of one CPU where there are none, while steps are taken: starting, validating
    and writing checkpoints are not in it. Without recorded devices it is left out.
    """
    steps, done = run / "train" / "metrics.jsonl", run / "train" / "done.json"
    if not (steps.is_file() and done.is_file()):
        return {}
    taken = [line for line in read_json_lines(steps)[0] if line["step"] >= 0]
    seconds = sum(line["time/collect_s"] + line["time/update_s"] for line in taken)
    found = {"tokens": float(sum(line.get("rollout/tokens", 0.0) for line in taken))}
    devices = read_record(done).get("devices")
    return found | (
        {f"{devices['kind'].lower()}_hours": devices["count"] * seconds / 3600} if devices else {}
    )


def answer_costs(folder: Path) -> dict[str, float]:
    """Tokens and seconds of an answer, and calls, tokens and seconds of each agent in it; {} where none is recorded.

    They are means over the completed trajectories of the evaluation in `folder`. Seconds of an answer are from its
    first call to the end of its last.
    """
    parts = [
        _turns(path, number) for number, path in enumerate(sorted(folder.glob("part_*.parquet")))
    ]
    if not parts or not sum(map(len, parts)):
        return {}
    turns = pd.concat(parts)
    answers = turns.groupby("answer")
    seconds = (answers["ended"].max() - answers["started"].min()).mean()
    found = {"tokens": turns["tokens"].sum() / len(answers), "seconds": float(seconds)}
    for agent, own in turns.groupby("agent", sort=False):
        sums = {"calls": len(own), "tokens": own["tokens"].sum(), "seconds": own["took"].sum()}
        found |= {
            f"agent/{agent}/{name}": float(value) / len(answers) for name, value in sums.items()
        }
    return found


def _turns(path: Path, number: int) -> pd.DataFrame:
    """A line for each turn of the completed trajectories of a shard: answer, agent, tokens, started, ended, took."""
    columns = ["status", *(f"turns.list.element.{name}" for name in _OF_TURNS)]
    with pq.ParquetFile(path) as file:
        table = bounded_table(file, columns)
    turns = table.filter(pc.equal(table["status"], "completed"))["turns"].combine_chunks()
    flat = pc.list_flatten(turns)
    started, took = pc.struct_field(flat, "started_s"), pc.struct_field(flat, "took_s")
    return pd.DataFrame(
        {
            "answer": [
                f"{number}/{parent}" for parent in pc.list_parent_indices(turns).to_pylist()
            ],
            "agent": pc.struct_field(flat, "agent").to_pandas(),
            "tokens": pc.list_value_length(pc.struct_field(flat, "completion_ids")).to_pandas(),
            "started": started.to_pandas(),
            "took": took.to_pandas(),
            "ended": pc.add(started, took).to_pandas(),
        }
    )
