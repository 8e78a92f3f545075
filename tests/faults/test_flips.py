"""A bit flips in what a run or a pipeline has written: it is refused in one line, or says the same as before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.evaluation.export import export
from mcore_mas.evaluation.seats import config_with_seats
from mcore_mas.pipeline.base_model import make_tiny_model
from mcore_mas.reports.paper_tables import TableError
from mcore_mas.reports.tables import read_evaluation
from mcore_mas.runtime.checkpoint import CheckpointError, Checkpoints, Written
from mcore_mas.runtime.recipe import Identity, recipe_of
from retrieval.build import build_index
from retrieval.corpus import RetrievalError, write_corpus
from retrieval.encoder import Encoder
from retrieval.index import Index
from rollout.base.digests import Digest, tree_sha256, write_chunks
from rollout.base.json_files import read_record, sealed, write_json
from rollout.base.ownership import FolderError
from rollout.records.files import (
    RecordError,
    read_tasks,
    read_trajectories,
    write_tasks,
    write_trajectories,
)
from rollout.records.trajectory import Message, Trajectory, Turn, VersionSpan
from rollout.tasks.arithmetic import arithmetic_tasks
from tests.faults.forked import PASSAGES, bare_folder

FLIPS = 60


def flipped(path: Path, flips: Sequence[tuple[int, int]] = ()) -> Iterator[tuple[int, int]]:
    """The file with another bit flipped each time, and which: byte and bit, at random where not named."""
    whole, draw = path.read_bytes(), random.Random(0)
    for place, bit in flips or [
        (draw.randrange(len(whole)), draw.randrange(8)) for _ in range(FLIPS)
    ]:
        changed = bytearray(whole)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        yield place, bit
    path.write_bytes(whole)


def refused_or_the_same(
    path: Path,
    read: Callable[[], Any],
    errors: type[Exception],
    flips: Sequence[tuple[int, int]] = (),
) -> int:
    """How many of the flips are refused; AssertionError if one is neither refused nor without a consequence."""
    expected, refused = read(), 0
    for place, bit in flipped(path, flips):
        try:
            found = read()
        except errors as error:
            refused += 1
            assert "\n" not in str(error) and path.name in str(error)
        else:
            assert found == expected, (
                f"bit {bit} of byte {place} of {path.name} changes what is read"
            )
    assert read() == expected
    return refused


@pytest.mark.parametrize("name", ["manifest.json", "policy/weights"])
def test_a_checkpoint(tmp_path: Path, name: str) -> None:
    identity = Identity(run="r", models={"policy": {"vocab": 512}}, recipe={"seed": 1})

    async def write(folder: Path) -> Written:
        async def written() -> dict[str, Digest]:
            (folder / "policy").mkdir()
            return {
                "policy/weights": write_chunks(folder / "policy" / "weights", [bytes(range(256))])
            }

        return written

    async def save() -> None:
        checkpoints = Checkpoints(tmp_path, identity, keep=2)
        await checkpoints.save(1, {"kl": {"policy": 0.25}}, write, 0.5)
        await checkpoints.finish()

    asyncio.run(save())

    def read() -> Any:
        try:
            found = Checkpoints(tmp_path, identity, keep=2).newest(lambda line: None)
            return found, (tmp_path / "step_000001" / "policy" / "weights").read_bytes()
        finally:
            for aside in tmp_path.glob("refused_*"):
                aside.rename(tmp_path / "step_000001")

    assert refused_or_the_same(tmp_path / "step_000001" / name, read, CheckpointError) > FLIPS * 0.9


def played(number: int) -> Trajectory:
    turn = Turn(
        index=0,
        agent="solver",
        policy="p",
        policy_version=3,
        versions=(VersionSpan(version=3, start=0, end=2),),
        node="0",
        state_key="ab",
        messages=(Message(role="user", content=f"What is {number} + 1?"),),
        prompt_ids=tuple(range(number, number + 20)),
        completion_ids=(7, number),
        logprobs=(-0.5, -number / 8),
        temperature=1.0,
        text=f"It is {number + 1}.",
        finish_reason="stop",
        valid=True,
        seed=number,
        reward=number / 4,
    )
    own = {
        "task_id": f"a:{number}",
        "source": "a",
        "sample": 0,
        "step": 4,
        "outcome": 1.0,
        "answer": str(number + 1),
    }
    return Trajectory(id=f"4/a:{number}/0", turns=(turn,), metrics={"answered": 1.0}, **own)


@pytest.mark.slow
def test_tasks_and_trajectories(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", arithmetic_tasks(1, {"train": 40}))
    write_trajectories(tmp_path / "played", [played(number) for number in range(24)])
    """Bits that say nothing, such as of names that parquet has twice, are many in so small files."""
    for name, read in (("tasks", read_tasks), ("played", read_trajectories)):
        path = tmp_path / name
        assert refused_or_the_same(path, partial(read, path), RecordError) > FLIPS * 0.5
        in_pages = [
            place for column in columns(path) for place in range(column.start, column.stop, 5)
        ]
        flips = [(place, 0) for place in in_pages]
        assert refused_or_the_same(path, partial(read, path), RecordError, flips) > len(flips) * 0.8


def columns(path: Path) -> Iterator[range]:
    """Where the pages of a parquet file's columns lie."""
    groups = pq.read_metadata(path)
    for group in range(groups.num_row_groups):
        for column in map(groups.row_group(group).column, range(groups.num_columns)):
            first = column.dictionary_page_offset or column.data_page_offset
            yield range(first, first + column.total_compressed_size)


@pytest.mark.parametrize("name", ["index/vectors.faiss", "index/index.json", "passages.jsonl"])
def test_an_index_and_its_corpus(tmp_path: Path, name: str) -> None:
    bert = bare_folder(tmp_path) / "bert"
    write_corpus(tmp_path / "passages.jsonl", PASSAGES)
    build_index(tmp_path / "passages.jsonl", tmp_path / "index", Encoder.of("bge", bert))
    least = FLIPS * 0.9
    assert (
        refused_or_the_same(
            tmp_path / name, lambda: manifest_of(tmp_path / "index"), RetrievalError
        )
        > least
    )


def manifest_of(index_dir: Path) -> Any:
    return Index.open(index_dir, verify=True).manifest


def test_an_evaluation(tmp_path: Path) -> None:
    tasks = [{"task_id": f"a/{n}", "source": "a", "metrics": {"avg@2": n / 4}} for n in range(4)]
    counts = {"k": 2, "replies": 8, "overlong": 0, "cut": 0, "failed": {}}
    write_json(
        tmp_path / "trained.json",
        sealed({"run": "r", "state": "trained", **counts, "tasks": tasks}),
    )

    def read() -> Any:
        return read_evaluation(tmp_path / "trained.json").to_dict()

    assert refused_or_the_same(tmp_path / "trained.json", read, TableError) > FLIPS * 0.8
    compared = lambda: read_record(tmp_path / "trained.json", "tasks")["tasks"]  # noqa: E731
    assert refused_or_the_same(tmp_path / "trained.json", compared, FolderError) > FLIPS * 0.8


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_finished_model(tmp_path: Path, name: str) -> None:
    """An evaluation, `serve`, `chat` and `export` take one whose files are those that training wrote."""
    config = RunConfig.check(resolve(["experiment=demo_math", f"results={tmp_path}"]), "test")
    model = config.folder / "train" / "models" / "solver"
    make_tiny_model(model)
    (config.folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    done = {"policies": {"solver": str(model)}, "sha256": {"solver": tree_sha256(model)}}
    write_json(config.folder / "train" / "done.json", done)

    def read() -> Any:
        return config_with_seats(config, "trained", {"verifier": "base"}).policies

    assert refused_or_the_same(model / name, read, FolderError) == FLIPS
    for _ in flipped(model / name, [(0, 0)]):
        with pytest.raises(
            FolderError, match=rf"{name}: not there, or not as it was written; train again"
        ):
            export(config.folder, "solver", tmp_path / "exported", print)
    assert not (tmp_path / "exported").exists()
    (model / name).unlink()
    with pytest.raises(FolderError, match=rf"{name}: not there"):
        read()


def test_a_config_is_refused_or_of_another_recipe_or_the_same_but_for_what_may_change(
    tmp_path: Path,
) -> None:
    """It has no digest, as people write them: a checkpoint's recipe refuses to go on with another."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(resolve(["experiment=demo_math", f"results={tmp_path}"])))
    expected, refused, other = recipe_of(RunConfig.load(path)), 0, 0
    for _ in flipped(path):
        try:
            other += recipe_of(RunConfig.load(path)) != expected
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused + other > FLIPS * 0.5
