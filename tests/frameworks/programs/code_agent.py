"""Have a command-line agent write a program in a fresh repository, and print what the program prints.

code_agent.py codex|codex-functions|claude FOLDER      FOLDER has the agents' npm packages
"""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The models that Codex knows write JavaScript that calls its tools. One that it does not know gets
# the tools themselves, as functions.
MODELS = {"codex-functions": ("--model", "agent")}
WANTED = "Write answer.py, a program that prints the answer and nothing else, and then stop. "


def command(agent: str, folder: Path, problem: str) -> list[str]:
    """Return the agent's command; its settings point it to the gateway."""
    binaries = folder / "node_modules" / ".bin"
    if agent == "claude":
        return [str(binaries / "claude"), "-p", problem, "--dangerously-skip-permissions"]
    provider = {
        "name": "gateway",
        "base_url": os.environ["OPENAI_BASE_URL"],
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    settings = ", ".join(f'{key} = "{value}"' for key, value in provider.items())
    return [
        str(binaries / "codex"),
        "exec",
        problem,
        "-c",
        'model_provider="gateway"',
        "-c",
        f"model_providers.gateway={{{settings}}}",
        "--skip-git-repo-check",
        "--sandbox",
        "workspace-write",
        *MODELS.get(agent, ()),
    ]


@contextmanager
def numbered_folder() -> Iterator[Path]:
    """Yield a new folder with the lowest free number.

    The agents write its path into their prompts. A random name would make all prompts different.
    """
    for number in itertools.count():
        folder = Path(tempfile.gettempdir()) / f"agent-{number}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        try:
            yield folder
        finally:
            # A process that the agent left running may still write there.
            shutil.rmtree(folder, ignore_errors=True)
        return


agent = sys.argv[1]
with numbered_folder() as home:
    repository = home / "repository"
    repository.mkdir()
    settings = {
        "HOME": str(home),
        "CODEX_HOME": str(home),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # no call that names the conversation
        "IS_SANDBOX": "1",  # lets Claude Code run commands as root
        "DISABLE_AUTOUPDATER": "1",
    }
    finished = subprocess.run(
        command(agent, Path(sys.argv[2]).absolute(), WANTED + sys.stdin.read()),
        cwd=repository,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    print(finished.stdout, finished.stderr, file=sys.stderr)
    tested = subprocess.run(
        [sys.executable, "answer.py"], cwd=repository, capture_output=True, text=True, check=True
    )
    print(f"\\boxed{{{tested.stdout.strip()}}}")
