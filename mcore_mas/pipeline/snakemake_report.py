"""Snakemake's HTML report of a suite, written from inside a running Snakemake."""

import base64
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mcore_mas.pipeline.suite_file import SNAKEFILE

_STYLESHEET = SNAKEFILE.parent / "report" / "first_page.css"
# Stands for the picture of the curves on the first page, in base64. Snakemake's report prints the
# suite file, which would otherwise hold the whole picture.
CURVES_PLACEHOLDER = "Y3VydmVzIG9mIHRoZSBydW5z"


class ReportError(RuntimeError):
    """Snakemake could not write its report; its own messages are in the log above."""


def make_report(
    suite: Mapping[str, Any], targets: Sequence[str], out: Path, curves: str = ""
) -> None:
    """Write one HTML page about the files `targets` and all jobs that they depend on.

    A second Snakemake reads the records of the running one. It takes no lock, because the first one
    holds it, and starts no job, because every target is an input of the rule that calls this.

    Args:
        suite: the content of the suite file, with additions for the first page.
        targets: files that the report shows.
        out: the HTML page.
        curves: SVG for the first page; "" for none.

    Raises:
        ReportError: Snakemake ended with an error or wrote no page.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".report-") as folder:
        suite_path = Path(folder) / "suite.yaml"
        page = Path(folder) / "report.html"
        content = dict(suite)
        if curves:
            content["curves"] = CURVES_PLACEHOLDER
        suite_path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

        command = [sys.executable, "-m", "snakemake"]
        command += ["--snakefile", str(SNAKEFILE)]
        command += ["--configfile", str(suite_path)]
        command += ["--workflow-profile", "none", "--nolock", "--cores", "1"]
        command += ["--report", str(page), "--report-stylesheet", str(_STYLESHEET)]
        command += ["--", *targets]
        status = subprocess.run(command, check=False).returncode
        if status != 0 or not page.is_file():
            raise ReportError(f"{out}: snakemake --report wrote no page (status {status})")
        picture = base64.b64encode(curves.encode()).decode()
        address = "data:image/svg+xml;base64,"
        text = page.read_text(encoding="utf-8")
        page.write_text(
            text.replace(f"{address}{CURVES_PLACEHOLDER}", f"{address}{picture}"), encoding="utf-8"
        )
        page.replace(out)
