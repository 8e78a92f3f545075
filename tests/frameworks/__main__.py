"""Trains the programs of all frameworks, or of those that are named, and writes docs/frameworks.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.frameworks.training import (
    FRAMEWORKS,
    PYTHON,
    RIGHT,
    ROOT,
    SCORED,
    STEPS,
    TRAINED,
    UPDATES,
    digest_of,
    train,
)

PAGE = ROOT / "docs" / "frameworks.md"
HEAD = f"""# Agent programs of published frameworks, trained as they are

Made by `make test-frameworks`, or for one framework by `make test-frameworks ONLY=LangGraph`. The packages come from
the index, at the versions of `requirements/frameworks.txt`. No line of the programs knows of this project: environment
variables point to the gateway ([gateway.md](gateway.md)), and CrewAI's `CREWAI_TESTING` keeps it from asking on the
terminal whether to show its traces.

All play what they ship, unchanged; SHA-256 is that of the files named, one after the other:

- **AG2**: the program of a page in its source distribution, an agent who chats with the person at the keyboard. It
  answers a fixed question, and then the sum. (It is version 0.10: what 0.11 ships does not fit its own `LLMConfig`.)
- **CrewAI**: the crew of a researcher and an analyst that `crewai create crew sums` writes.
  [ask_crew.py](../tests/frameworks/programs/ask_crew.py), of three lines, gives it the sum as its topic.
- **OpenAI Agents SDK**: the example of parallel agents in its source distribution, in which three agents translate
  side by side and a fourth picks the best. It reads what to translate, and is given a sum.
- **smolagents**: its command `smolagent`. It tries up to 20 times until its code answers, and each try lengthens the
  prompt; here its fifth call of the model fails it, which counts as wrong (`rules: {{most_calls: 4, crash: wrong}}`).
- **Anthropic SDK**: the example of a chat with a memory tool in its source distribution.
- **LangGraph**: the graph of an agent and its tools among the examples in the source distribution of its command
  line, langgraph-cli; [ask_graph.py](../tests/frameworks/programs/ask_graph.py), of three lines, gives it the sum.

Each task is a sum of two numbers from 1 to 3. A model of two layers with random weights first imitates a careless
teacher who answers the same programs and is right in {100 * RIGHT:.0f} % of its replies, at first with the last 64
tokens of each prompt only, and then learns from the reward of the program's answer: one policy for all agents, GRPO,
{STEPS} steps of {9 * TRAINED} trajectories, {UPDATES} updates each. The shares right are those of {9 * SCORED}
trajectories on the nine sums that it trains on; the interval is one of 95 % over sums. Minutes are those of two
shared CPU cores, the environment's imports included.

"""
COLUMNS = """| framework | package | program | turns | before | after | gain | 95 % interval | minutes |
|---|---|---|---:|---:|---:|---:|---|---:|
"""
UNCLEAR = "\nOf these the gain is not beyond doubt:\n\n"


def row(name: str, version: str, digest: str, found: Mapping[str, float]) -> str:
    """A framework's line of the table, shares in %; `digest` is that of its files."""
    before, after, low, high = (100 * found[key] for key in ("before", "after", "low", "high"))
    framework = FRAMEWORKS[name]
    shown = f"[{framework.ours}](../tests/frameworks/programs/{framework.ours}), ours"
    if framework.shipped:
        shown = f"shipped: {', '.join(f'`{path}`' for path in framework.shipped)} {digest}"
    return (
        f"| {name} | {framework.package} {version} | {shown} | "
        f"{found['turns']:.1f} | {before:.1f} | {after:.1f} | {after - before:+.1f} | "
        f"[{low:+.1f}, {high:+.1f}] | {found['minutes']:.1f} |"
    )


def page(rows: Mapping[str, str], before: str = "") -> str:
    """The page with these rows, and of other frameworks those of the page before; clear gains first."""
    kept = {
        line[1]: line[0]
        for line in re.finditer(r"^\| ([^|]+) \| [a-z0-9-]+ \d.*$", before, re.MULTILINE)
    }
    known = {**kept, **rows}
    lines = [f"{known[name]}\n" for name in FRAMEWORKS if name in known]
    clear, rest = (
        [line for line in lines if "[+" in line],
        [line for line in lines if "[+" not in line],
    )
    return HEAD + COLUMNS + "".join(clear) + ("".join([UNCLEAR, COLUMNS, *rest]) if rest else "")


def version_of(package: str) -> str:
    """The version that requirements/frameworks.txt pins."""
    pinned = (ROOT / "requirements" / "frameworks.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(package)}==(\S+)$", pinned, re.MULTILINE | re.IGNORECASE)
    assert found, package
    return found[1]


def main(names: Sequence[str]) -> int:
    """1 where a framework's team did not learn: each is trained in a process of its own."""
    if names[:1] == ["--one"]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(train(names[1], PYTHON, Path(folder))))
        return 0
    poor = []
    for name in names or FRAMEWORKS:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.frameworks", "--one", name],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            cwd=ROOT,
        )
        if done.returncode:
            poor.append(name)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        poor += [name] if found["low"] <= 0 else []
        line = row(
            name, version_of(FRAMEWORKS[name].package), digest_of(FRAMEWORKS[name], PYTHON), found
        )
        print(line, flush=True)
        before = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        PAGE.write_text(page({name: line}, before), encoding="utf-8")
    print(f"did not learn: {', '.join(poor)}" if poor else f"wrote {PAGE}")
    return bool(poor)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
