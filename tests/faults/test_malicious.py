"""Files made to fill memory, or a stack, are refused in one line, by a process of bounded memory."""

import subprocess
import sys
from pathlib import Path

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


LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 11))
YAMLS = {
    "aliases": LAUGHS,
    "long words": f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]\n",
    "merged": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)),
    "endless": "a: &a [*a]\n",
    "deep": "a: " + "[" * 100_000,
    "large": "a: [" + "1, " * (2 << 20) + "]",
}


@pytest.mark.parametrize("kind", YAMLS)
def test_a_suite(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(YAMLS[kind])
    command = "from mcore_mas.pipeline.suite_file import check_command; check_command(['--configfile', sys.argv[1]])"
    assert refused(command, file).startswith(f"error: --configfile {file}: not YAML (more than 4194304 ")


def test_a_config(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(LAUGHS)
    said = refused("from mcore_mas.config.run import RunConfig; RunConfig.load(Path(sys.argv[1]))", file)
    assert said.startswith(f"mcore_mas.config.run.ConfigError: {file}: not YAML (more than 4194304 characters with its")
