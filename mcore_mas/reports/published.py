"""Published experiments: their hyper-parameters beside the papers', and what was run of them at the scale tiny.

docs/experiments.md has the table of the former, docs/tables_tiny.md that of the latter.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from mcore_mas import SHIPPED
from mcore_mas.config.compose import CONFIGS, expand_braces, experiments, resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.equations.losses import LOSSES
from mcore_mas.reports.pages import render_page
from mcore_mas.reports.paper_tables import PaperTable, table_names
from mcore_mas.reports.tables import markdown_table
from mcore_mas.rollout.base.files import json_lines, read_yaml

EXPERIMENTS_PAGE = CONFIGS.parent / "docs" / "experiments.md"
UNKNOWN = "unknown"
_TURNS = ("max_turns", "max_loops", "rounds", "max_nodes", "max_programs")  # options of orchestras


def _one(values: Iterable[Any]) -> Any:
    """The value that all have, or the different ones."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different[0] if len(different) == 1 else different


def _of_policies(key: str) -> Callable[[RunConfig], Any]:
    return lambda config: _one(getattr(policy, key) for policy in config.policies.values())


def _of_agents(key: str) -> Callable[[RunConfig], Any]:
    return lambda config: _one(getattr(agent, key) for agent in config.agents.values())


def _of_loss(key: str) -> Callable[[RunConfig], Any]:
    def value(config: RunConfig) -> Any:
        return config.loss.options.get(key, inspect.signature(LOSSES[config.loss.name]).parameters[key].default)

    return value


def _filter(config: RunConfig) -> Any:
    numbers = [value for value in config.filter.options.values() if isinstance(value, float)] if config.filter else []
    return [config.filter.name, *numbers] if config.filter else None


def _kl(config: RunConfig) -> Any:
    kl = config.loss.kl
    return [kl.coef, kl.estimate, kl.where] if kl.coef else 0.0


HYPERPARAMETERS: Mapping[str, Callable[[RunConfig], Any]] = {
    "estimator": lambda config: _one(config.advantage_of(agent).name for agent in config.agents),
    "learning rate": _of_policies("lr"),
    "warm-up": _of_policies("warmup_steps"),  # updates
    "schedule": _of_policies("schedule"),
    "final learning rate": _of_policies("min_lr"),
    "betas": lambda config: _one(list(policy.betas) for policy in config.policies.values()),
    "weight decay": _of_policies("weight_decay"),
    "gradient clip": _of_policies("clip_grad"),
    "critic learning rate": lambda config: _one(p.critic.lr if p.critic else None for p in config.policies.values()),
    "tasks per step": lambda config: config.trainer.tasks_per_step,
    "group size": lambda config: (
        config.trainer.branching.width if config.trainer.branching else config.trainer.group_size
    ),
    "updates per step": lambda config: (
        f"mini-batches of {config.trainer.minibatch} rows"
        if config.trainer.minibatch
        else config.trainer.updates_per_step
    ),
    "steps": lambda config: config.trainer.steps,
    "lower clip": _of_loss("clip_low"),
    "upper clip": _of_loss("clip_high"),
    "dual clip": _of_loss("dual_clip"),
    "aggregation": lambda config: config.loss.aggregation,
    "entropy": lambda config: config.loss.entropy,
    "KL": _kl,
    "temperature": _of_agents("temperature"),
    "top-p": _of_agents("top_p"),
    "top-k": _of_agents("top_k"),
    "reply tokens": _of_agents("max_tokens"),
    "prompt tokens": lambda config: config.engine.max_length - max(a.max_tokens for a in config.agents.values()),
    "turns": lambda config: next(
        (config.orchestra.options[key] for key in _TURNS if key in config.orchestra.options), None
    ),
    "malformed reply": lambda config: config.reward.penalties.get("invalid", {}).get("coef", 0.0),
    "thinking": lambda config: _one(p.chat_template_kwargs.get("enable_thinking") for p in config.policies.values()),
    "evaluation samples": lambda config: config.evaluation.samples,
    "evaluation temperature": lambda config: config.evaluation.temperature,
    "evaluation top-p": lambda config: config.evaluation.top_p,
    "filter": _filter,
    "seed": lambda config: config.seed,
    "prompts": lambda config: "ours",  # of every role, see docs/catalogue.md
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedValue:
    """One hyper-parameter of an experiment, in the paper and here."""

    name: str
    ours: Any
    theirs: Any  # UNKNOWN where neither paper nor code gives it
    source: str  # where theirs is read
    reason: str  # why ours is another; "" where none is given

    @property
    def differs(self) -> bool:
        """Whether theirs is known and another."""
        return bool(self.theirs != UNKNOWN and self.ours != self.theirs)

    def __str__(self) -> str:
        return f"{self.name} {_shown(self.ours)}, published {_shown(self.theirs)}: {self.reason}"


@cache
def read_published() -> dict[str, Any]:
    """docs/published.yaml: `sources`, `families`, `hardware` and `rows`."""
    return dict(read_yaml(EXPERIMENTS_PAGE.with_name("published.yaml")))


@cache
def published_values(experiment: str) -> dict[str, PublishedValue]:
    """The hyper-parameters of an experiment that docs/published.yaml says anything about, by name."""
    theirs: dict[str, tuple[Any, str]] = {}
    reasons: dict[str, str] = {}
    for family in read_published()["families"]:
        if any(fnmatch(experiment, pattern) for pattern in family["of"]):
            theirs |= dict.fromkeys(family.get("unknown", ()), (UNKNOWN, ""))
            theirs |= {name: (value, source) for name, (value, source) in family.get("values", {}).items()}
            reasons |= family.get("differs", {})
    config = RunConfig.check(resolve([f"experiment={experiment}"]), experiment)
    return {
        name: PublishedValue(
            name=name, ours=HYPERPARAMETERS[name](config), theirs=value, source=source, reason=reasons.get(name, "")
        )
        for name, (value, source) in theirs.items()
    }


def paper_hardware(experiment: str) -> str | None:
    """The GPUs that an experiment's paper names, such as 8xH100; None where it names none."""
    found = [own["gpus"] for own in read_published()["hardware"] if any(fnmatch(experiment, p) for p in own["of"])]
    return found[-1] if found else None


def published_experiments() -> list[str]:
    """The experiments that a paper reports: all but the demonstrations."""
    return [name for name in experiments() if not name.startswith("demo_")]


def experiments_page() -> str:
    """docs/experiments.md with its table written anew from docs/published.yaml."""
    lines = ["| experiment | reports | evidence | differences from the paper |", "|---|---|---|---|"]
    for row in read_published()["rows"]:
        names = [name for name, _ in expand_braces(row["of"])]
        listed = dict.fromkeys(str(v) for name in names for v in published_values(name).values() if v.differs)
        text = "; ".join(filter(None, [row["besides"], *listed]))
        lines.append(f"| `{row['of']}` | {row['reports']} | {row['evidence']} | {text} |")
    page = EXPERIMENTS_PAGE.read_text(encoding="utf-8")
    return re.sub(r"^\| experiment \|.*?(?=\n\n)", lambda _: "\n".join(lines), page, flags=re.MULTILINE | re.DOTALL)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


OUTCOMES = SHIPPED / "docs" / "tables_tiny.md"
SAMPLE = OUTCOMES.with_name("tables_drmas_1_tiny.md")


def outcomes_page(results: Path) -> str:
    """The page about the results folder of a run of the tables at the scale `tiny`."""
    tables = [PaperTable.load(name) for name in table_names()]
    rows = {name: _experiment(results / name) for table in tables for name in table.experiments}
    made = {table.name: _made(results / "tables" / f"{table.name}.json") for table in tables}
    jobs = [job for file in sorted(results.rglob("benchmarks/*.jsonl")) for job in _jobs(file)[-1:]]
    ended = [row for row in rows.values() if row["outcome"].startswith("ran")]
    latest = max((mark for mark in made.values() if mark), default=(0.0, "none"))
    return render_page(
        "tables_tiny.md.jinja",
        made=sum(mark is not None for mark in made.values()),
        ended=len(ended),
        day=datetime.fromtimestamp(latest[0], UTC).date(),
        commit=latest[1],
        jobs=jobs,
        tables=markdown_table(pd.DataFrame([_table(table, made, rows) for table in tables])),
        count=len(tables),
        rows=markdown_table(pd.DataFrame({"experiment": f"`{name}`", **row} for name, row in rows.items()).fillna("")),
        experiments=len(rows),
    )


def sample_page(results: Path) -> str | None:
    """Dr.MAS' Table 1 as that run made it, its head and all; None where it did not."""
    table = results / "tables" / "drmas_1.md"
    note = "Copied by `mcore-mas write tables-tiny` from results/tiny/tables/drmas_1.md, as `make tables-tiny` left it."
    return f"{table.read_text(encoding='utf-8').rstrip()}\n\n{note}\n" if table.is_file() else None


def _table(table: PaperTable, made: dict[str, Any], rows: dict[str, dict[str, str]]) -> dict[str, str]:
    ran = sum(rows[name]["outcome"].startswith("ran") for name in table.experiments)
    return {
        "table": f"`table_{table.name}`",
        "of": table.config.title,
        "made": "yes" if made[table.name] else "no",
        "experiments run": f"{ran} of {len(table.experiments)}",
    }


def _made(path: Path) -> tuple[float, str] | None:
    """When a table was made, in Unix time, and at which commit."""
    return (path.stat().st_mtime, json.loads(path.read_text(encoding="utf-8"))["commit"]) if path.is_file() else None


def _experiment(run: Path) -> dict[str, str]:
    evaluated = sorted(path.stem for path in (run / "evaluation").glob("*.json"))
    done = (run / "train" / "done.json").is_file()
    untrained = evaluated and not (run / "train").exists()  # some tables have no more of it
    ran = "ran" if done else "ran untrained" if untrained else ""
    outcome = (evaluated and ran) or _failure(run) or ("unfinished" if run.is_dir() else "not run")
    updates = Counter[str]()
    for step in _jobs(run / "train" / "metrics.jsonl"):
        found = {key: re.fullmatch(r"policy/(.+)/updates", key) for key in step}
        updates.update({match[1]: int(step[key]) for key, match in found.items() if match})
    return {
        "outcome": outcome,
        "updates": ", ".join(f"{policy} {count}" for policy, count in updates.items()),
        "train, s": _seconds(run, ["train"]),
        "evaluated": ", ".join(evaluated),
        "evaluate, s": _seconds(run, [f"evaluate_{state}" for state in evaluated]),
    }


def _seconds(run: Path, jobs: Sequence[str]) -> str:
    found = [job["s"] for name in jobs for job in _jobs(run / "benchmarks" / f"{name}.jsonl")[-1:]]
    return f"{sum(found):.0f}" if found else ""


def _failure(run: Path) -> str:
    """The cause that the log of a failed job ends with."""
    for log in sorted((run / "logs").glob("*.log"), key=lambda file: file.stat().st_mtime):
        last = log.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
        if last.startswith("error: "):
            return f"failed, {log.stem}: {last.removeprefix('error: ')}"
    return ""


def _jobs(path: Path) -> list[dict[str, Any]]:
    return json_lines(path)[0] if path.is_file() else []
