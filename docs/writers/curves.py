"""Writer of the README's picture: reward, outcome and validation accuracy of the demo's two runs, by training step."""

from __future__ import annotations

from pathlib import Path

from docs.writers import DOCS, ROOT
from mcore_mas.reports.charts import key_curves
from mcore_mas.reports.step_metrics import read_metrics

PICTURE = DOCS / "pictures" / "demo.svg"
_DEMO = (ROOT / "results" / "demo_math", ROOT / "results" / "demo_search")


def pages(*runs: Path) -> dict[Path, str]:
    """Return the picture of the runs in these folders, by default those of `make demo`.

    Raises:
        MetricsError: a run has no metrics.
    """
    metrics = {run.name: read_metrics(run / "train" / "metrics.jsonl") for run in runs or _DEMO}
    return {PICTURE: key_curves(metrics)}
