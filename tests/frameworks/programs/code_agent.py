"""Have a command-line agent write a program in a fresh repository, and print what the program prints.

code_agent.py codex|codex-functions|claude FOLDER      FOLDER has the agents' npm packages
"""

import os
import subprocess
import sys
import tempfile
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
        "--dangerously-bypass-approvals-and-sandbox",
        *MODELS.get(agent, ()),
    ]


agent = sys.argv[1]
with tempfile.TemporaryDirectory() as home:
    repository = Path(home) / "repository"
    repository.mkdir()
    settings = {
        "HOME": home,
        "CODEX_HOME": home,
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
