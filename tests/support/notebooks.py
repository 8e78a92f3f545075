"""Execution of docs/notebooks: `python -m tests.support.notebooks` runs all and saves their output."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def digest(notebook: nbformat.NotebookNode) -> str:
    """Return the digest of the code cells, without their output."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook in a folder; return it with the output of its cells and the digest of its code."""
    # tqdm warns that ipywidgets is not installed
    os.environ |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "IPYTHONDIR": str(folder),
    }
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    options = {
        "timeout": 900,
        "startup_timeout": 300,
        "coalesce_streams": True,
        "record_timing": False,
    }
    NotebookClient(notebook, resources=resources, **options).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text" in output:  # Ray prints a line about missing widgets
                output.text = re.sub(r".*ipywidgets.*\n", "", output.text)
    notebook.metadata["executed"] = digest(notebook)
    return notebook


def main(names: list[str]) -> None:
    """Run the notebooks of these names, or all."""
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(execute(path, Path(folder)), path)
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
