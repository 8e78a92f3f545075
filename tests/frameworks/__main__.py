"""Train the programs of all frameworks, or of those that are named, and write their results into docs/frameworks.md."""

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
UNCLEAR = "\nThe interval of these gains includes zero:\n\n"


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


def page(rows: Mapping[str, str], before: str) -> str:
    """Return the page `before` with these rows in its table; rows of other frameworks stay.

    Frameworks whose gain is certain come first; the others have a table of their own.
    """
    head, _, rest = before.partition(BEGIN)
    table, _, tail = rest.partition(END)
    known: dict[str, str] = {}
    for line in re.finditer(r"^\| ([^|]+) \| [a-z0-9-]+ \d.*$", table, re.MULTILINE):
        known[line[1]] = line[0]
    known |= rows
    lines = [f"{known[name]}\n" for name in FRAMEWORKS if name in known]
    certain = [line for line in lines if "[+" in line]
    uncertain = [line for line in lines if "[+" not in line]
    tables = [COLUMNS, *certain]
    if uncertain:
        tables += [UNCLEAR, COLUMNS, *uncertain]
    return "".join([head, BEGIN, *tables, END, tail])


def version_of(framework: Framework) -> str:
    """Return the version of a framework's package that its requirements file pins."""
    file = ROOT / "requirements" / f"{framework.requirements}.txt"
    package = re.escape(framework.package)
    pinned = file.read_text(encoding="utf-8")
    match = re.search(rf"^{package}==(\S+)$", pinned, re.MULTILINE | re.IGNORECASE)
    assert match, framework.package
    return match[1]


def main(names: Sequence[str]) -> int:
    """Train each framework in its own process; return 1 if the team of one did not learn."""
    if names[:1] == ["--one"]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(train(names[1], Path(folder))))
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
        framework = FRAMEWORKS[name]
        line = row(name, version_of(framework), digest_of(framework), found)
        print(line, flush=True)
        PAGE.write_text(page({name: line}, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"did not learn: {', '.join(poor)}" if poor else f"wrote {PAGE}")
    return bool(poor)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
