"""Snakemake's HTML report of finished results, made while the pipeline that made them still runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

SNAKEFILE = Path(__file__).resolve().parents[2] / "Snakefile"


class ReportError(RuntimeError):
    """Snakemake could not write its report; its own words are in the log above."""


def make_report(suite: Mapping[str, Any], targets: Sequence[str], out: Path) -> None:
    """Write one HTML page `out` about the files `targets` and all jobs behind them.

    A second Snakemake reads what the running one recorded. It takes no lock, because the first holds it, and starts
    no job, because every target is an input of the rule that calls this.

    Raises:
        ReportError: Snakemake ended with an error.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".report-") as folder:
        suite_file, page = Path(folder) / "suite.yaml", Path(folder) / "report.html"
        suite_file.write_text(yaml.safe_dump(dict(suite), sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE), "--configfile", str(suite_file)]
        command += ["--workflow-profile", "none", "--nolock", "--cores", "1", "--report", str(page), "--", *targets]
        status = subprocess.run(command, check=False).returncode
        if status != 0 or not page.is_file():
            raise ReportError(f"{out}: snakemake --report ended with status {status}")
        page.replace(out)
