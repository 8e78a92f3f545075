"""The code blocks of the documents, and what runs each line of their shell blocks."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from docs.writers.__main__ import SITE

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {f"{name}.md" for name in (*SITE, "tables_tiny", "tables_drmas_1_tiny")}


def committed_pages() -> list[Path]:
    """Return the pages of the repository, without those that `make site` and `make tables-tiny` write."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name not in GENERATED]
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages])


PAGES = committed_pages()
STORIES = {  # by page, the test that runs its blocks, or makes the page
    "quickstart.md": "workflow/test_quickstart.py",
    "own_team.md": "workflow/test_own_folder.py",
    "own_reward.md": "unit/test_own_reward_page.py",
}
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block: its page, its name (`README-2` is the third of the README), its language and its lines."""

    page: str
    name: str
    language: str
    body: str

    @property
    def lines(self) -> list[str]:
        """The commands of a shell block, a line each, without comments behind them."""
        whole = self.body.replace("\\\n", "").splitlines()
        return [
            line for line in (re.sub(r"(^|\s+)# .*$", "", line).strip() for line in whole) if line
        ]


BLOCKS = [
    Block(page.name, f"{page.stem}-{number}", language, textwrap.dedent(body))
    for page in PAGES
    for number, (_, language, body) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]
_COMMANDS_PAGE = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
_ROWS = re.findall(
    r"^\| `(mcore-mas [^`]+)`(?:, `(mcore-mas [^`]+)`)?", _COMMANDS_PAGE, flags=re.MULTILINE
)
TABLE_COMMANDS = [command for row in _ROWS for command in row if command]

HERE = "workflow/test_shell_blocks.py"
LONG = "make test-documents"  # the same file; what takes longer than the suite has time for
SLURM, SUITE = "make test-slurm", "it is the suite, or part of it"
# by lines of shell blocks and of the README's table of commands: what runs them, and why it is not the first
RUN_BY: dict[str, tuple[str, str]] = {
    r"make (setup|lint|test|demo)|\.ci/run": (".ci/run", f"{SUITE}; the demo takes twelve minutes"),
    r"make test-\w+": ("itself", SUITE),
    r"\.venv/bin/snakemake results/demo_math/tasks/.*": (LONG, "a cold start of minutes"),
    r"\.venv/bin/snakemake --configfile workflow/suites/tiny\.yaml": (
        "workflow/test_pipeline.py",
        "a minute",
    ),
    r"conda .*|bash environment\.post-deploy\.sh": (
        "nothing",
        "conda, and kernels that are compiled for a GPU",
    ),
    r"snakemake --workflow-profile slurm .*|squeue .*|scancel .*|tail -f .*": (
        SLURM,
        "Slurm; jobs of other numbers",
    ),
    r"make retriever .* SLURM=.*": (SLURM, "Slurm"),
    r"cd my_team|rm -r results|sinfo .*|job=.*|tail -n .*|cat results/tables/my_team\.md": (
        SLURM,
        "slurm/test_slurm_walk.py has its own project",
    ),
    r"mcore-mas (check|run) my_team\.yaml.*|mcore-mas (show|export) results/my_team .*": (
        SLURM,
        "slurm/test_slurm_walk.py has its own project",
    ),
    r"mcore-mas show results/my_team/.*": (SLURM, "slurm/test_slurm_walk.py has its own project"),
    r"mcore-mas train results/demo_math --adopt": (
        "unit/training/test_fork.py",
        "a run of another recipe",
    ),
    r"python3\.12 -m venv \.venv-sglang .*": (
        "make test-sglang",
        "4 GB of wheels for GPUs; its CPU build is made there",
    ),
    r"export RAY_AUTH_MODE=token|ray .*": ("make test-nodes", "nodes with addresses of their own"),
    r"snakemake (table_drmas_1|bundle_drmas_1|tables --config scale=tiny)": (
        "make tables-tiny",
        "GPUs, or an hour; there at the scale tiny, and a bundle in workflow/test_paper_targets.py",
    ),
    r"snakemake table_drmas_1 --config scale=tiny": (LONG, "minutes"),
    r"mcore-mas verify drmas_1\.bundle\.zip": (
        "workflow/test_paper_targets.py",
        "another table's bundle",
    ),
    r"snakemake acquire.*": (
        "workflow/test_paper_targets.py",
        "a hub and gigabytes; there a hub of its own",
    ),
    r"mcore-mas replay .*": ("unit/training/test_async_rollout.py", "a trajectory that failed"),
    r"mcore-mas run my_suite\.yaml tracking\.uri=http://host:5000": (
        "unit/tracking/test_mlflow_training.py",
        "a server",
    ),
    r"mcore-mas run my_suite\.yaml tracking=wandb": (
        "unit/tracking/test_writers.py",
        "wandb is not installed",
    ),
    r"mcore-mas (serve|studio|ui)( results/demo_math| --store .*)?|make ui|curl .*": (
        LONG,
        "a port that may be taken",
    ),
    r"mcore-mas serve .*|make retriever .*": (LONG, "seconds"),
    r"mcore-mas (export|new|track|leaks) .*": (LONG, "seconds; each has tests of its own"),
}


def runner(line: str) -> str:
    """What runs a line of a shell block."""
    return next((by for pattern, (by, _) in RUN_BY.items() if re.fullmatch(pattern, line)), HERE)
