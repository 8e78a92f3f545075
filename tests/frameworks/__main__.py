"""Train the programs of agent frameworks, and write their results into docs/frameworks.md.

python -m tests.frameworks [FRAMEWORK...]           all frameworks by default
python -m tests.frameworks --one FRAMEWORK          print the results as JSON instead
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.frameworks.training import (
    FRAMEWORKS,
    PACKAGE_FILE,
    ROOT,
    Framework,
    digest_of,
    train,
)

PAGE = ROOT / "docs" / "frameworks.md"
BEGIN = "<!-- frameworks:begin -->\n"
END = "<!-- frameworks:end -->"
COLUMNS = """| framework | package | program | turns | before | after | gain | 95 % interval | minutes |
|---|---|---|---:|---:|---:|---:|---|---:|
"""
UNCERTAIN = "\nThe interval of these gains includes zero:\n\n"


def row(name: str, version: str, digest: str, results: Mapping[str, float]) -> str:
    """Return a framework's row of the table, with shares in %.

    Args:
        name: name of the framework.
        version: version of its package.
        digest: SHA-256 of its shipped files.
        results: results of `train`.
    """
    framework = FRAMEWORKS[name]
    program = f"[{framework.ours}](../tests/frameworks/programs/{framework.ours}), ours"
    if framework.shipped:
        paths = ", ".join(f"`{path}`" for path in framework.shipped)
        program = f"shipped: {paths} {digest}"
    before = 100 * results["before"]
    after = 100 * results["after"]
    cells = [
        name,
        f"{framework.package} {version}",
        program,
        f"{results['turns']:.1f}",
        f"{before:.1f}",
        f"{after:.1f}",
        f"{after - before:+.1f}",
        f"[{100 * results['low']:+.1f}, {100 * results['high']:+.1f}]",
        f"{results['minutes']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def update_page(text: str, new_rows: Mapping[str, str]) -> str:
    """Replace rows of the page's table; the rows of other frameworks stay.

    Frameworks whose interval is above zero come first; the others have a table of their own.

    Args:
        text: text of the page.
        new_rows: row by framework.
    """
    head, _, rest = text.partition(BEGIN)
    table, _, tail = rest.partition(END)
    old_rows = {
        match[1]: match[0]
        for match in re.finditer(r"^\| ([^|]+) \| [a-z0-9@/-]+ \d.*$", table, re.MULTILINE)
    }
    rows = old_rows | dict(new_rows)
    lines = [f"{rows[name]}\n" for name in FRAMEWORKS if name in rows]
    certain = [line for line in lines if "[+" in line]
    uncertain = [line for line in lines if "[+" not in line]
    tables = [COLUMNS, *certain]
    if uncertain:
        tables += [UNCERTAIN, COLUMNS, *uncertain]
    return "".join([head, BEGIN, *tables, END, tail])


def version_of(framework: Framework) -> str:
    """Return the version of a framework's package that its requirements file, or package.json, pins."""
    if framework.coding_agent:
        pinned = json.loads(PACKAGE_FILE.read_text(encoding="utf-8"))["dependencies"]
        return str(pinned[framework.package])
    file = ROOT / "requirements" / f"{framework.requirements}.txt"
    package = re.escape(framework.package)
    requirements = file.read_text(encoding="utf-8")
    match = re.search(rf"^{package}==(\S+)$", requirements, re.MULTILINE | re.IGNORECASE)
    assert match, framework.package
    return match[1]


def training_error(status: int) -> str:
    """Describe the end of a training's process that printed no results; "" for exit status 0."""
    if status < 0:
        return f"the training was killed by {signal.Signals(-status).name}"
    if status > 0:
        return f"the training failed with exit status {status}; its error is above"
    return ""


def main(names: Sequence[str]) -> int:
    """Train each framework in a process of its own.

    Returns:
        1 if a training failed, or if the interval of a gain is not above zero; otherwise 0.
    """
    if names[:1] == ["--one"]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(train(names[1], Path(folder))))
        return 0
    problems = []
    for name in names or FRAMEWORKS:
        training = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.frameworks", "--one", name],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            cwd=ROOT,
        )
        error = training_error(training.returncode)
        if error:
            problems.append(f"{name}: {error}")
            continue
        results = json.loads(training.stdout.splitlines()[-1])
        if results["low"] <= 0:
            problems.append(f"{name}: did not learn, the interval of its gain is not above zero")
        framework = FRAMEWORKS[name]
        new_row = row(name, version_of(framework), digest_of(framework), results)
        print(new_row, flush=True)
        text = update_page(PAGE.read_text(encoding="utf-8"), {name: new_row})
        PAGE.write_text(text, encoding="utf-8")
        print(f"wrote the row of {name} in {PAGE}", flush=True)
    for problem in problems:
        print(problem)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
