"""How long the way of one turn is, from the engine that samples it to the optimizer that trains on it."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.credit.assign import estimate
from mcore_mas.credit.samples import to_samples
from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups
from mcore_mas.rollout.config.sections import build_allocator, build_env, build_player, build_team
from mcore_mas.rollout.records.trajectory import Task
from mcore_mas.training.policy_trainer import PolicyTrainer, policy_spec
from tests.support.in_process import Bytes, Engine, Group, make_model
from tests.support.play import collect

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
FOR_CUDA = "mcore_mas/megatron/cpu.py"  # stands in for CUDA; no turn meets it on a GPU
MOST_FILES = 30  # that run anything
MOST_HOLDING = 14  # whose functions are given the turn
MOST_SHAPES = 5  # record types that hold a turn's tokens
_TOKENS = {"completion_ids", "token_ids", "labels", "logprobs"}  # fields of theirs


def shapes_in(value: Any) -> set[str]:
    """The record types with a turn's tokens among an argument, or a collection's first."""
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    kind = type(value)
    if not dataclasses.is_dataclass(kind) or kind.__module__.partition(".")[0] != "mcore_mas":
        return set()
    return {kind.__qualname__} if _TOKENS & {field.name for field in dataclasses.fields(kind)} else set()


class Trace:
    """The files of our packages in the order in which calls reach them, by phase."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, None]] = {}
        self.shapes: dict[str, None] = {}
        self.holding: dict[str, None] = {}  # files with a function that is given one of them

    def phase(self, name: str, run: Callable[[], T]) -> T:
        files = self.phases.setdefault(name, {})

        def seen(frame: FrameType, event: str, argument: Any) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] == "mcore_mas":
                files[str(path.relative_to(ROOT))] = None
                for value in frame.f_locals.values():  # at a call: the arguments
                    for shape in shapes_in(value):
                        self.shapes[shape] = self.holding[str(path.relative_to(ROOT))] = None

        sys.setprofile(seen)
        try:
            return run()
        finally:
            sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        return {file for own in self.phases.values() for file in own} - {FOR_CUDA}

    def __str__(self) -> str:
        lines = [f"{name} ({len(own)} files): {' > '.join(own)}" for name, own in self.phases.items()]
        held = (
            f"{len(self.holding)} of them are given the turn, as {' > '.join(self.shapes)}: {' > '.join(self.holding)}"
        )
        return "\n".join([*lines, f"{len(self.files)} files in all", held])


@pytest.mark.slow
def test_a_turn_passes_through_few_files_in_few_shapes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    config = RunConfig.check(
        resolve(
            [
                "experiment=demo_math",
                f"results={tmp_path}",
                "orchestra.options.max_loops=1",
                "reward.name=tests.support.rewards:by_first_token",
                "~reward.penalties",
                f"policies.solver.model={model}",
                f"policies.verifier.model={model}",
            ]
        ),
        "route",
    )
    engine = Engine(model, max_length=512, rows=8)
    player = build_player(engine, Bytes(), deadline_s=None, max_in_flight=None)
    team = build_team(config.agents, dict.fromkeys(config.policies, player))
    task = Task(id="1", prompt="task 1", answers=("1",), env="math", source="s", split="train")
    make_env, orchestra = build_env(config.env), config.orchestra.call
    allocate = build_allocator(config.reward, config.agents)
    init_process_groups(rank=0, threads=1)
    try:
        rules = {name: config.advantage_of(name) for name in config.agents}
        for _ in range(2):  # the first time also loads what is loaded once
            trace = Trace()
            trainer = PolicyTrainer("solver", config, Group(policy_spec("solver", config)))  # type: ignore[arg-type]
            played = collect([task], team, make_env, orchestra, group_size=4, seed=1, step=0)
            groups = trace.phase("collect", partial(asyncio.run, played))
            groups = trace.phase("reward", partial(list, map(allocate, groups)))
            samples = trace.phase("samples", partial(to_samples, groups))
            batches = trace.phase("pack", partial(trainer.pack, samples, 0))
            credited = trace.phase("credit", partial(estimate, samples, rules))
            metrics = trace.phase("update", partial(asyncio.run, trainer.update(batches, credited, 0)))
    finally:
        destroy_process_groups()
    print(trace)
    assert metrics["grad_norm"] > 0.0  # it was trained on
    assert len(trace.shapes) <= MOST_SHAPES, str(trace)
    assert len(trace.holding) <= MOST_HOLDING, str(trace)
    assert len(trace.files) <= MOST_FILES, str(trace)
