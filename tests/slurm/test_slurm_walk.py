"""Commands of docs/cluster.md's first section on a real Slurm: from a new team to an exported model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## From a laptop to Slurm\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"```sh\n(.*?)```", SECTION, flags=re.DOTALL)
FASTER_POLLING = "--slurm-init-seconds-before-status-checks 2 --latency-wait 5"


def test_a_team_goes_from_a_laptop_to_slurm_as_the_page_says(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--slurm"):
        pytest.skip("takes minutes; `make test-slurm` runs it")
    slurm: Slurm = request.getfixturevalue("slurm")
    command = tmp_path / "bin" / "mcore-mas"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mcore_mas "$@"\n')
    command.chmod(0o755)
    environment = slurm.env | {
        "PATH": f"{command.parent}:{slurm.env['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    team = tmp_path / "my_team"
    run = team / "results/my_team"
    log = run / "logs/train.log"
    pipeline_log = tmp_path / "pipeline.log"

    def shell(block: str, folder: Path = team) -> str:
        """Run the commands of a block; return their output."""
        completed = subprocess.run(
            ["bash", "-euc", block],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        output = f"{completed.stdout[-3000:]}{completed.stderr[-5000:]}"
        assert completed.returncode == 0, f"{block}\n{output}"
        return completed.stdout

    try_on_laptop, clean, show_nodes, plan, submit, watch, requeue, export = BLOCKS
    assert "ok: my_team" in shell(try_on_laptop, tmp_path)
    assert (run / "train/done.json").is_file()
    shell(clean)
    assert "gpu:fake:4" in shell(show_nodes)
    assert "train" in shell(plan)
    assert slurm.is_idle()

    with pipeline_log.open("w") as output:
        pipeline = subprocess.Popen(
            ["bash", "-euc", f"exec {submit.strip()} {FASTER_POLLING}"],
            cwd=team,
            env=os.environ | environment,
            stdout=output,
            stderr=output,
        )

        def has_trained_or_ended() -> bool:
            if pipeline.poll() is not None:
                return True
            return log.is_file() and "train: 3/40" in log.read_text()

        try:
            wait_until(has_trained_or_ended, 400)
            assert pipeline.poll() is None, pipeline_log.read_text()[-4000:]
            shown = shell(watch)
            assert re.search(r"RUNNING \S+ .*rule_train", shown), shown
            assert "my_team train: " in shown, shown

            shell(requeue)
            job = slurm.find_job("train")
            slurm.wait_for_requeue(job, 120)
            slurm.start_soon(job)
            assert pipeline.wait(600) == 0, pipeline_log.read_text()[-4000:]
        finally:
            pipeline.terminate()
            pipeline.wait(60)
    # The second start of the job continues the training of the first.
    assert "continuing from results/my_team/train/checkpoints/step_" in log.read_text()
    assert "my_team" in shell(export)
    assert (team / "exported" / "config.json").is_file()
