"""Files made to exhaust memory or the stack are refused in one line, by a process with little memory."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
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


def refusal(code: str, *arguments: object, mb: int = 3072) -> str:
    """Run code that must fail in a process with `mb` MiB of address space; return the last line of its error."""
    command = [sys.executable, "-c", LIMITED.format(mb=mb, code=code), *map(str, arguments)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert completed.returncode == 1, completed.stderr[-2000:]
    return completed.stderr.splitlines()[-1]


def ten_aliases(name: str) -> str:
    return ", ".join([f"*{name}"] * 10)


# Each list has ten times as many items as the one before: 10^10 at the end.
NESTED_ALIASES = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{ten_aliases(f'a{i - 1}')}]\n" for i in range(1, 11)
)
NESTED_MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [{ten_aliases(f'a{i - 1}')}]\n" for i in range(1, 9)
)
YAML_FILES = {
    "aliases": NESTED_ALIASES,
    "merged": NESTED_MERGES,
    "endless": "a: &a [*a]\n",  # a list that contains itself
}


@pytest.mark.parametrize("kind", YAML_FILES)
def test_a_suite_of_many_values_is_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(YAML_FILES[kind])
    code = (
        "from mcore_mas.pipeline.suite_file import check_command; "
        "check_command(['--configfile', sys.argv[1]])"
    )
    reason = "values nested deeper than 100" if kind == "endless" else "more than 1000000 "
    assert refusal(code, file).startswith(f"error: --configfile {file}: not YAML ({reason}")


def test_a_config_of_many_values_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(NESTED_ALIASES)
    code = "from mcore_mas.config.run import RunConfig; RunConfig.load(Path(sys.argv[1]))"
    assert refusal(code, file).startswith(
        f"mcore_mas.config.run.ConfigError: {file}: not YAML (more than 1000000 values with its"
    )


def write_large(path: Path, content: str) -> Path:
    """Write a sparse file with the size of 200 GiB and almost no bytes on disk."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    os.truncate(path, 200 << 30)
    return path


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


def write_index_of_many_vectors(path: Path) -> Path:
    """Write an index of two vectors that claims to have 2^36."""
    index = faiss.IndexIDMap(faiss.IndexFlatIP(4))
    index.add_with_ids(np.ones((2, 4), np.float32), np.arange(2))
    faiss.write_index(index, str(path))
    content = bytearray(path.read_bytes())
    # The number of ids comes before the two ids at the end, each of 8 bytes.
    content[-24:-16] = (1 << 36).to_bytes(8, "little")
    path.write_bytes(content)
    return path


@dataclass(frozen=True)
class Case:
    """Malicious file.

    Attributes:
        make: makes the file in a folder; returns the path to read.
        code: reads the path sys.argv[1].
        error: pattern of the error.
    """

    make: Callable[[Path], Path]
    code: str
    error: str


DEEP = "[" * 500_000
READ_CONFIG = "from rollout.models.architecture import read_config; read_config(sys.argv[1])"
READ_ROWS = "from rollout.tasks.rows import read_rows; [*read_rows(Path(sys.argv[1]))]"
CASES = {
    "a large config.json of a model": Case(
        lambda folder: write_large(folder / "m" / "config.json", "{}").parent,
        READ_CONFIG,
        "ModelError: .*config.json is not readable .more than 67108864 bytes",
    ),
    "a deep config.json of a model": Case(
        lambda folder: write(folder / "m" / "config.json", DEEP).parent,
        READ_CONFIG,
        "ModelError: .*config.json is not readable .brackets are nested too deeply",
    ),
    "a large index of tensors": Case(
        lambda folder: write_large(folder / "m" / "model.safetensors.index.json", "{}").parent,
        "from rollout.models.tensors import TensorFiles; TensorFiles(sys.argv[1])",
        "ModelError: .*index.json is not readable .more than",
    ),
    "a large JSON file of rows": Case(
        lambda folder: write_large(folder / "d.json", "[]"),
        READ_ROWS,
        "RecordError: .*more than",
    ),
    "a deep JSON file of rows": Case(
        lambda folder: write(folder / "d.json", DEEP),
        READ_ROWS,
        "RecordError: .*nested too deeply",
    ),
    "a deep line of rows": Case(
        lambda folder: write(folder / "d.jsonl", f"{DEEP}\n"),
        READ_ROWS,
        "RecordError: .*line 1 cannot be read",
    ),
    "a long line of rows": Case(
        lambda folder: write_large(folder / "d.jsonl", "{}\n"),
        READ_ROWS,
        "RecordError: .*line 2 has more than",
    ),
    "a long line of a corpus": Case(
        lambda folder: write(
            folder / "c.jsonl", '{"id": "1", "contents": "' + "x" * (17 << 20) + '"}\n'
        ),
        "from retrieval.corpus import Corpus; Corpus(Path(sys.argv[1]))[0]",
        "RetrievalError: .*c.jsonl:1: a line of 17825820 bytes; expected at most 16777216",
    ),
    "a FAISS index that claims to be large": Case(
        lambda folder: write_index_of_many_vectors(folder / "index.faiss"),
        "from retrieval.index import read_vectors; read_vectors(Path(sys.argv[1]))",
        "RetrievalError: .*index.faiss: not a FAISS index, or damaged",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_large_or_deep_file_is_refused(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert re.search(case.error, refusal(case.code, case.make(tmp_path), mb=8192))
