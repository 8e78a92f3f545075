"""Files made to fill memory, or a stack, are refused in one line, by a process of bounded memory."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest

LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, ({mb} << 20, {mb} << 20))
{code}
"""


def refused(code: str, *arguments: object, mb: int = 3072) -> str:
    """The error that `code` ends with, as one line, in a process of at most `mb` MiB of addresses."""
    command = [sys.executable, "-c", LIMITED.format(mb=mb, code=code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    return done.stderr.splitlines()[-1]


LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 11)
)
YAMLS = {
    "aliases": LAUGHS,
    "merged": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)),
    "endless": "a: &a [*a]\n",
}


@pytest.mark.parametrize("kind", YAMLS)
def test_a_suite(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(YAMLS[kind])
    command = "from mcore_mas.pipeline.suite_file import check_command; check_command(['--configfile', sys.argv[1]])"
    reason = "values nested deeper than 100" if kind == "endless" else "more than 1000000 "
    assert refused(command, file).startswith(f"error: --configfile {file}: not YAML ({reason}")


def test_a_config(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(LAUGHS)
    said = refused(
        "from mcore_mas.config.run import RunConfig; RunConfig.load(Path(sys.argv[1]))", file
    )
    assert said.startswith(
        f"mcore_mas.config.run.ConfigError: {file}: not YAML (more than 1000000 values with its"
    )


def hollow(path: Path, content: str, size: int = 200 << 30) -> Path:
    """A file that is `size` bytes to those who ask, and next to nothing on disk."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    os.truncate(path, size)
    return path


def index_that_says_more(path: Path) -> Path:
    """One of FAISS whose header names a million million floats."""
    index = faiss.IndexIDMap(faiss.IndexFlatIP(4))
    index.add_with_ids(np.ones((2, 4), np.float32), np.arange(2))
    faiss.write_index(index, str(path))
    content = bytearray(path.read_bytes())
    content[-24:-16] = (1 << 36).to_bytes(
        8, "little"
    )  # before the two ids of 8 bytes, how many they are
    path.write_bytes(content)
    return path


READ_CONFIG = "from rollout.models.architecture import read_config; read_config(sys.argv[1])"
READ_ROWS = "from rollout.tasks.rows import read_rows; [*read_rows(Path(sys.argv[1]))]"
CASES: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "a model's config.json is large": (
        lambda folder: hollow(folder / "m" / "config.json", "{}").parent,
        READ_CONFIG,
        "ModelError: .*config.json is not readable .more than 67108864 bytes",
    ),
    "it is deep": (
        lambda folder: written(folder / "m" / "config.json", "[" * 500_000).parent,
        READ_CONFIG,
        "ModelError: .*config.json is not readable .too many brackets in each other",
    ),
    "an index of tensors is large": (
        lambda folder: hollow(folder / "m" / "model.safetensors.index.json", "{}").parent,
        "from rollout.models.tensors import TensorFiles; TensorFiles(sys.argv[1])",
        "ModelError: .*index.json is not readable .more than",
    ),
    "a data file is large": (
        lambda folder: hollow(folder / "d.json", "[]"),
        READ_ROWS,
        "RecordError: .*more than",
    ),
    "it is deep, too": (
        lambda folder: written(folder / "d.json", "[" * 500_000),
        READ_ROWS,
        "RecordError: .*too many brackets",
    ),
    "a line of it is deep": (
        lambda folder: written(folder / "d.jsonl", "[" * 500_000 + "\n"),
        READ_ROWS,
        "RecordError: .*line 1 cannot be read",
    ),
    "a line of it is long": (
        lambda folder: hollow(folder / "d.jsonl", "{}\n"),
        READ_ROWS,
        "RecordError: .*line 2 has more than",
    ),
    "a corpus has a long line": (
        lambda folder: written(
            folder / "c.jsonl", '{"id": "1", "contents": "' + "x" * (17 << 20) + '"}\n'
        ),
        "from retrieval.corpus import Corpus; Corpus(Path(sys.argv[1]))[0]",
        "RetrievalError: .*c.jsonl:1: a line of 17825820 bytes; expected at most 16777216",
    ),
    "an index of FAISS says that it is large": (
        lambda folder: index_that_says_more(folder / "index.faiss"),
        "from retrieval.index import read_vectors; read_vectors(Path(sys.argv[1]))",
        "RetrievalError: .*index.faiss: not a FAISS index, or damaged",
    ),
}


def written(path: Path, content: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_file(case: str, tmp_path: Path) -> None:
    make, code, expected = CASES[case]
    assert re.search(expected, refused(code, make(tmp_path), mb=8192))
