"""The notebooks of the documents: kept with what they show, and one of them run in a kernel of its own."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import NOTEBOOKS, digest, execute
from tests.support.run_folder import describe_model


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_was_executed(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.get("executed") == digest(notebook), "run: make notebooks"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    shown = [out.data for cell in cells for out in cell.outputs if "data" in out]
    assert any("<svg" in data.get("text/html", "") for data in shown)  # the curves of its run
    assert "/work/" not in json.dumps(notebook) and "/tmp/" not in json.dumps(notebook)


def test_the_models_notebook_takes_a_gpu_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells as far as the training, on a machine that says that it has one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("mcore_mas.pipeline.check.count_visible_gpus", lambda: 1)
    monkeypatch.chdir(tmp_path)
    describe_model(Path("Qwen/Qwen2.5-0.5B-Instruct"))
    (path,) = [path for path in NOTEBOOKS if path.stem == "own_model"]
    cells = [
        cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
    ]
    Path("cells.py").write_text("\n".join(cells[:3]).removesuffix("await run.arun()"))
    config = runpy.run_path("cells.py")["run"].config
    assert (config.engine.device, config.engine.max_length, config.cluster.pool) == (
        "cuda",
        1024,
        "shared",
    )
    policy = config.policies["shared"]
    assert (policy.model, policy.lr, policy.bf16) == ("Qwen/Qwen2.5-0.5B-Instruct", 1e-6, True)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_notebook_trains_inside_its_running_event_loop(tmp_path: Path) -> None:
    (path,) = [path for path in NOTEBOOKS if path.stem == "credit"]
    notebook = execute(path, tmp_path)
    shown = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    (checked,) = [out for source, out in shown.items() if "by_hand[place]" in source]
    assert [out.data["text/plain"] for out in checked] == [
        "True"
    ]  # advantages by hand are those of the training
    (explained,) = [
        out for source, out in shown.items() if source.startswith('run.explain("drmas"')
    ]
    text = "".join(out.data["text/plain"] for out in explained)
    assert re.search(
        r"agent editor +│ .* 4 ", re.sub(r"\x1b\[[0-9;]*m", "", text)
    )  # a group of an agent's own four
