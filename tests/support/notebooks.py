"""Notebooks of docs/notebooks, executed: `python -m tests.support.notebooks` runs all and keeps what they show."""

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
    """Of all that the cells say, without what came of it."""
    return hashlib.sha256("\0".join(cell.source for cell in notebook.cells).encode()).hexdigest()


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook, run in `folder` by a kernel of its own: with what cells show, and the digest of what they say."""
    # a bar of tqdm's says in a warning that ipywidgets would draw it
    os.environ |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "IPYTHONDIR": str(folder),
    }
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    options = {
        "timeout": 900,
        "startup_timeout": 300,
        "coalesce_streams": True,
        "record_timing": False,
    }
    NotebookClient(notebook, resources=place, **options).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text" in output:  # but for what Ray says of the widgets that are not there
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
