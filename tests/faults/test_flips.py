"""Files of runs and pipelines with one flipped bit: they are refused in one line, or read as before."""

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
from mcore_mas.runtime.checkpoint import CheckpointError, Checkpoints, WaitWritten
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
from tests.faults.forked import PASSAGES, preparation_folder

FLIPS = 60

Flip = tuple[int, int]  # a byte of a file, and a bit of that byte


def random_flips(size: int) -> list[Flip]:
    """Draw FLIPS bits of a file of `size` bytes."""
    generator = random.Random(0)
    return [(generator.randrange(size), generator.randrange(8)) for _ in range(FLIPS)]


def flip_bits(path: Path, flips: Sequence[Flip] = ()) -> Iterator[Flip]:
    """Yield each flip while the file has this one bit flipped; restore the file at the end.

    Args:
        flips: bits to flip, by default random ones.
    """
    content = path.read_bytes()
    for byte, bit in flips or random_flips(len(content)):
        damaged = bytearray(content)
        damaged[byte] ^= 1 << bit
        path.write_bytes(damaged)
        yield byte, bit
    path.write_bytes(content)


def count_refusals(
    path: Path,
    read: Callable[[], Any],
    error_type: type[Exception],
    flips: Sequence[Flip] = (),
) -> int:
    """Flip bits of a file one by one; return how many of the flips are refused.

    Args:
        read: reads the file.
        error_type: exception that a refusal must be. Its message must be one line and name the file.
        flips: bits to flip, by default random ones.

    Raises:
        AssertionError: a flip is not refused, and changes the result of `read`.
    """
    expected = read()
    refusals = 0
    for byte, bit in flip_bits(path, flips):
        try:
            result = read()
        except error_type as error:
            refusals += 1
            assert "\n" not in str(error)
            assert path.name in str(error)
        else:
            assert result == expected, f"bit {bit} of byte {byte} of {path.name} changes the result"
    assert read() == expected
    return refusals


@pytest.mark.parametrize("name", ["manifest.json", "policy/weights"])
def test_flipped_bits_of_a_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    identity = Identity(run="r", models={"policy": {"vocab": 512}}, recipe={"seed": 1})
    step_folder = tmp_path / "step_000001"

    async def write(folder: Path) -> WaitWritten:
        async def wait_written() -> dict[str, Digest]:
            weights = folder / "policy" / "weights"
            weights.parent.mkdir()
            return {"policy/weights": write_chunks(weights, [bytes(range(256))])}

        return wait_written

    async def save() -> None:
        checkpoints = Checkpoints(tmp_path, identity, keep=2)
        await checkpoints.save(1, {"kl": {"policy": 0.25}}, write, 0.5)
        await checkpoints.finish()

    asyncio.run(save())

    def read() -> Any:
        try:
            checkpoint = Checkpoints(tmp_path, identity, keep=2).recover_newest(lambda line: None)
            return checkpoint, (step_folder / "policy" / "weights").read_bytes()
        finally:
            for refused_folder in tmp_path.glob("refused_*"):
                refused_folder.rename(step_folder)

    assert count_refusals(step_folder / name, read, CheckpointError) > FLIPS * 0.9


def example_trajectory(number: int) -> Trajectory:
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
    return Trajectory(
        id=f"4/a:{number}/0",
        task_id=f"a:{number}",
        source="a",
        sample=0,
        step=4,
        turns=(turn,),
        metrics={"answered": 1.0},
        outcome=1.0,
        answer=str(number + 1),
    )


@pytest.mark.slow
def test_flipped_bits_of_tasks_and_trajectories_are_refused(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", arithmetic_tasks(1, {"train": 40}))
    write_trajectories(
        tmp_path / "trajectories", [example_trajectory(number) for number in range(24)]
    )
    for name, read in (("tasks", read_tasks), ("trajectories", read_trajectories)):
        path = tmp_path / name
        # In files this small, many bits have no effect, such as those of names that parquet stores twice.
        assert count_refusals(path, partial(read, path), RecordError) > FLIPS * 0.5

        flips = []
        for pages in column_pages(path):
            flips += [(byte, 0) for byte in range(pages.start, pages.stop, 5)]
        assert count_refusals(path, partial(read, path), RecordError, flips) > len(flips) * 0.8


def column_pages(path: Path) -> Iterator[range]:
    """Yield the bytes of the pages of each column of a parquet file."""
    metadata = pq.read_metadata(path)
    for number in range(metadata.num_row_groups):
        row_group = metadata.row_group(number)
        for column_number in range(metadata.num_columns):
            column = row_group.column(column_number)
            start = column.dictionary_page_offset or column.data_page_offset
            yield range(start, start + column.total_compressed_size)


@pytest.mark.parametrize("name", ["index/vectors.faiss", "index/index.json", "passages.jsonl"])
def test_flipped_bits_of_an_index_or_its_corpus_are_refused(tmp_path: Path, name: str) -> None:
    bert = preparation_folder(tmp_path) / "bert"
    write_corpus(tmp_path / "passages.jsonl", PASSAGES)
    build_index(tmp_path / "passages.jsonl", tmp_path / "index", Encoder.of("bge", bert))

    def read() -> Any:
        return Index.open(tmp_path / "index", verify=True).manifest

    assert count_refusals(tmp_path / name, read, RetrievalError) > FLIPS * 0.9


def test_flipped_bits_of_an_evaluation_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trained.json"
    tasks = [{"task_id": f"a/{n}", "source": "a", "metrics": {"avg@2": n / 4}} for n in range(4)]
    counts = {"k": 2, "replies": 8, "overlong": 0, "cut": 0, "failed": {}}
    write_json(path, sealed({"run": "r", "state": "trained", **counts, "tasks": tasks}))

    def read_for_table() -> Any:
        return read_evaluation(path).to_dict()

    def read_for_comparison() -> Any:
        return read_record(path, "tasks")["tasks"]

    assert count_refusals(path, read_for_table, TableError) > FLIPS * 0.8
    assert count_refusals(path, read_for_comparison, FolderError) > FLIPS * 0.8


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_flipped_bits_of_a_finished_model_are_refused(tmp_path: Path, name: str) -> None:
    """Evaluations, `serve`, `chat` and `export` accept a model only with the files that training wrote."""
    config = RunConfig.from_values(resolve(["experiment=demo_math", f"results={tmp_path}"]), "test")
    model = config.folder / "train" / "models" / "solver"
    make_tiny_model(model)
    (config.folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    record = {"policies": {"solver": str(model)}, "sha256": {"solver": tree_sha256(model)}}
    write_json(config.folder / "train" / "done.json", record)

    def read() -> Any:
        return config_with_seats(config, "trained", {"verifier": "base"}).policies

    assert count_refusals(model / name, read, FolderError) == FLIPS

    message = rf"{name}: not there, or not as it was written; train again"
    for _ in flip_bits(model / name, [(0, 0)]):
        with pytest.raises(FolderError, match=message):
            export(config.folder, "solver", tmp_path / "exported", print)
    assert not (tmp_path / "exported").exists()

    (model / name).unlink()
    with pytest.raises(FolderError, match=rf"{name}: not there"):
        read()


def test_flipped_bits_of_a_config_are_refused_or_change_the_recipe(tmp_path: Path) -> None:
    """A config has no digest, because users edit it; a checkpoint refuses a config with another recipe."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(resolve(["experiment=demo_math", f"results={tmp_path}"])))
    expected = recipe_of(RunConfig.load(path))
    refused = 0
    changed = 0
    for _ in flip_bits(path):
        try:
            recipe = recipe_of(RunConfig.load(path))
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            changed += recipe != expected
    # The other bits are in settings that a continued run may change.
    assert refused + changed > FLIPS * 0.5
