"""The code blocks of the documents, and what runs each line of their shell blocks."""

from __future__ import annotations

import itertools
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
# by page, the test that runs its blocks in their order
STORIES = {
    "quickstart.md": "workflow/test_quickstart.py",
    "own_team.md": "workflow/test_own_folder.py",
    "one_gpu.md": "workflow/test_one_gpu_page.py",
    "own_reward.md": "unit/docs/test_own_reward_page.py",
}
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_TABLE_ROW = re.compile(r"^\| `(mcore-mas [^`]+)`(?:, `(mcore-mas [^`]+)`)?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page.

    Attributes:
        page: name of its file.
        name: page and number of the block; `README-2` is the third block of the README.
        language: after the opening fence, "" if there is none.
        body: text between the fences.
    """

    page: str
    name: str
    language: str
    body: str

    @property
    def lines(self) -> list[str]:
        """Commands of a shell block, without comments."""
        commands = []
        for line in self.body.replace("\\\n", "").splitlines():
            command = re.sub(r"(^|\s+)# .*$", "", line).strip()
            if command:
                commands.append(command)
        return commands


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page, in their order."""
    fences = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [
        Block(page.name, f"{page.stem}-{number}", language, textwrap.dedent(body))
        for number, (_, language, body) in enumerate(fences)
    ]


def table_commands() -> list[str]:
    """Return the commands in the first column of the table of docs/commands.md."""
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    cells = itertools.chain.from_iterable(_TABLE_ROW.findall(text))
    return [cell for cell in cells if cell]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
TABLE_COMMANDS = table_commands()


@dataclass(frozen=True, slots=True)
class Runner:
    """Test or target that runs a command of the pages instead of test_shell_blocks.py.

    Attributes:
        by: file below tests/ or of the repository, or a make target; "itself" for a make target that is a suite of
            tests; "nothing" if no test runs the command.
        reason: why tests/workflow/test_shell_blocks.py does not run it.
    """

    by: str
    reason: str


HERE = "workflow/test_shell_blocks.py"
LONG = "make test-documents"  # runs commands that take longer than the normal tests may
SLURM = "make test-slurm"
_WALK = Runner(SLURM, "slurm/test_slurm_walk.py runs it in a project of its own")

# by pattern of a whole command; the first that matches counts
RUN_BY: dict[str, Runner] = {
    r"make (setup|lint|test|demo)|\.ci/run": Runner(".ci/run", "it runs this test"),
    r"make test-\w+": Runner("itself", "it is a suite of tests"),
    r"\.venv/bin/snakemake results/demo_math/tasks/.*": Runner(LONG, "a cold start takes minutes"),
    r"\.venv/bin/snakemake --configfile workflow/suites/tiny\.yaml": Runner(
        "workflow/test_pipeline.py", "takes a minute"
    ),
    r"conda .*|bash environment\.post-deploy\.sh": Runner(
        "nothing", "needs conda, and compiles kernels for a GPU"
    ),
    r"snakemake --workflow-profile slurm .*|squeue .*|scancel .*|tail -f .*": Runner(
        SLURM, "needs Slurm; its jobs have other numbers"
    ),
    r"make retriever .* SLURM=.*": Runner(SLURM, "needs Slurm"),
    r"cd my_team|rm -r results|sinfo .*|job=.*|tail -n .*": _WALK,
    r"mcore-mas (check|run) my_team\.yaml.*|mcore-mas (show|export) results/my_team[ /].*": _WALK,
    r"cat results/tables/my_team\.md": _WALK,
    r"mcore-mas train results/demo_math --fork": Runner(
        "unit/training/test_fork.py", "needs a run with another recipe"
    ),
    r"mcore-mas run my_suite\.yaml -n": Runner(
        "workflow/test_own_folder.py", "needs the page's suite"
    ),
    r"python -m venv .*": Runner("make test-environments", "it makes these environments"),
    r"make setup-sglang": Runner("make test-sglang", "installs 4 GB of wheels, or 1 GB for CPUs"),
    r"export RAY_AUTH_MODE=token|ray .*": Runner(
        "make test-nodes", "needs nodes with addresses of their own"
    ),
    r"snakemake (table_drmas_1|bundle_drmas_1|tables --config scale=tiny)": Runner(
        "make tables-tiny", "needs GPUs or an hour; workflow/test_paper_targets.py makes a bundle"
    ),
    r"snakemake table_drmas_1 --config scale=tiny": Runner(LONG, "takes minutes"),
    r"mcore-mas verify drmas_1\.bundle\.zip": Runner(
        "workflow/test_paper_targets.py", "needs a bundle; the test verifies that of another table"
    ),
    r"snakemake acquire.*": Runner(
        "workflow/test_paper_targets.py", "downloads gigabytes; the test has a hub of its own"
    ),
    r"mcore-mas evaluate results/mas --state .*|mcore-mas cross-play .*": Runner(
        "unit/reports/test_cross_play_matrix.py", "needs runs whose models play each other's agents"
    ),
    r"mcore-mas export results/demo_math_lora .*": Runner(
        "unit/evaluation/test_export.py", "needs a trained run with adapters"
    ),
    r"mcore-mas distill demo_math.*": Runner(
        "unit/pipeline/test_distill.py", "needs a trained team with right answers"
    ),
    r"mcore-mas run demo_distill && mcore-mas distill demo_distill.*": Runner(
        "make test-learning", "takes minutes"
    ),
    r"mcore-mas replay .*": Runner(
        "unit/training/test_async_rollout.py", "needs a trajectory that failed"
    ),
    r"mcore-mas run my_suite\.yaml tracking\.uri=http://host:5000": Runner(
        "unit/tracking/test_mlflow_training.py", "needs a server"
    ),
    r"mcore-mas run my_suite\.yaml tracking=wandb": Runner(
        "unit/tracking/test_writers.py", "wandb is not installed"
    ),
    r"mcore-mas (serve|studio|ui)( results/demo_math| --store .*)?|make ui|curl .*": Runner(
        LONG, "listens at a port that may be taken"
    ),
    r"mcore-mas serve .*|make retriever .*": Runner(LONG, "takes seconds"),
    r"mcore-mas (export|new|track|leaks) .*": Runner(LONG, "takes seconds; has tests of its own"),
}


def runner(command: str) -> str:
    """Return what runs a command of the pages: `Runner.by`, or HERE."""
    for pattern, entry in RUN_BY.items():
        if re.fullmatch(pattern, command):
            return entry.by
    return HERE
