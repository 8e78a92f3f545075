"""Snakemake's HTML report of a suite, written from inside a running Snakemake."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mcore_mas.pipeline.suite_file import SNAKEFILE

_STYLESHEET = SNAKEFILE.parent / "report" / "narrow.css"


class ReportError(RuntimeError):
    """Snakemake could not write its report; its own messages are in the log above."""


def make_report(suite: Mapping[str, Any], targets: Sequence[str], out: Path) -> None:
    """Write one HTML page about the files `targets` and all jobs that they depend on.

    A second Snakemake reads the records of the running one. It takes no lock, because the first one
    holds it, and starts no job, because every target is an input of the rule that calls this.

    Args:
        suite: the content of the suite file, with additions for the first page.
        targets: files that the report shows.
        out: the HTML page.

    Raises:
        ReportError: Snakemake ended with an error.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".report-") as folder:
        suite_path = Path(folder) / "suite.yaml"
        page = Path(folder) / "report.html"
        suite_path.write_text(yaml.safe_dump(dict(suite), sort_keys=False), encoding="utf-8")

        command = [sys.executable, "-m", "snakemake"]
        command += ["--snakefile", str(SNAKEFILE)]
        command += ["--configfile", str(suite_path)]
        command += ["--workflow-profile", "none", "--nolock", "--cores", "1"]
        command += ["--report", str(page), "--report-stylesheet", str(_STYLESHEET)]
        command += ["--", *targets]
        status = subprocess.run(command, check=False).returncode
        if status != 0 or not page.is_file():
            raise ReportError(f"{out}: snakemake --report ended with status {status}")
        page.replace(out)
