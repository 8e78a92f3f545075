"""Notebooks of the documentation: they are committed with their outputs, and one is run in its own kernel."""

from __future__ import annotations

import ast
import itertools
import json
import re
import runpy
from pathlib import Path

import nbformat
import pytest
from jupyter_client import launcher

from tests.support.notebooks import NOTEBOOKS, digest, execute
from tests.support.run_folder import describe_model
from tests.support.starts import Forked


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_the_outputs_of_its_cells(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.get("executed") == digest(notebook), "run: make notebooks"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    html = [output.data.get("text/html", "") for output in outputs if "data" in output]
    assert any("<svg" in text for text in html)  # the curves of its run
    assert "/work/" not in json.dumps(notebook)
    assert "/tmp/" not in json.dumps(notebook)


def results_of(stem: str) -> list[str]:
    """Return the text results of a notebook's cells, in their order."""
    (path,) = (path for path in NOTEBOOKS if path.stem == stem)
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    outputs = itertools.chain.from_iterable(cell.outputs for cell in cells)
    return [output.data["text/plain"] for output in outputs if "data" in output]


def test_the_notebooks_end_with_a_trained_team_that_is_right() -> None:
    number, remainder = ast.literal_eval(results_of("own_model")[-1])
    assert number.isdecimal()
    assert remainder == int(number) % 3 == 0

    *_, scores, replies = map(ast.literal_eval, results_of("first_team")[-2:])
    assert scores["base"]["avg@4"] < 0.1
    assert scores["trained"]["avg@4"] > 0.9
    for letter, reply in zip("ae", replies, strict=True):
        words = reply.split()
        assert all(word.isalpha() and letter in word for word in words)


def test_the_notebook_own_model_uses_a_gpu_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells before the training are run, on a machine that claims to have a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("mcore_mas.pipeline.check.count_visible_gpus", lambda: 1)
    monkeypatch.chdir(tmp_path)
    describe_model(Path("Qwen/Qwen2.5-0.5B-Instruct"))
    (path,) = (path for path in NOTEBOOKS if path.stem == "own_model")
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    Path("cells.py").write_text("\n".join(sources[:3]).removesuffix("await run.arun()"))
    config = runpy.run_path("cells.py")["run"].config
    assert config.engine.device == "cuda"
    assert config.engine.max_length == 1024
    assert config.cluster.pool == "shared"
    policy = config.policies["shared"]
    assert policy.model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert policy.lr == 1e-6
    assert policy.bf16 is True


@pytest.mark.slow
@pytest.mark.multirank
def test_a_notebook_trains_inside_its_running_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "Popen", Forked)  # the kernel starts as a fork
    (path,) = (path for path in NOTEBOOKS if path.stem == "credit")
    notebook = execute(path, tmp_path)
    outputs_by_source = {
        cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"
    }

    # The notebook compares its advantages by hand with those of the training.
    (comparison,) = (
        outputs for source, outputs in outputs_by_source.items() if "by_hand[place]" in source
    )
    assert [output.data["text/plain"] for output in comparison] == ["True"]

    (explanation,) = (
        outputs
        for source, outputs in outputs_by_source.items()
        if source.startswith('run.explain("drmas"')
    )
    text = "".join(output.data["text/plain"] for output in explanation)
    without_colours = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert re.search(r"agent editor +│ .* 4 ", without_colours)  # a group of the agent's four turns
