"""Check of the paths that Snakemake and Slurm put into shell commands.

`make setup` runs this file as a script, before there is an environment, so it imports nothing but
the standard library.
"""

import re
import sys
from pathlib import Path

# Blanks, single quotes and letters with accents are quoted correctly. These characters are not:
# Snakemake writes paths into double quotes, and pip into the first lines of scripts; Snakemake
# takes braces for wildcards.
_UNQUOTABLE = re.compile(r'["$`\\{}\x00-\x1f\x7f]')


def path_problem() -> str:
    """Return why no job can start because of a path, or "" if all paths can be quoted.

    The paths are those of the current folder, of this Python, and of this package.
    """
    paths = {
        "the current folder": str(Path.cwd()),
        "this Python": sys.executable,
        "mcore-mas": str(Path(__file__).resolve()),
    }
    for owner, path in paths.items():
        match = _UNQUOTABLE.search(path)
        if match is not None:
            return (
                f"the path of {owner}, {path!r}, has the character {match[0]!r}, which shell "
                "commands of jobs cannot have in a path; rename the folder, and run `make setup` "
                "again if it has the project's .venv"
            )
    return ""


if __name__ == "__main__":
    problem = path_problem()
    sys.exit(f"error: {problem}" if problem else 0)
