"""The blocks of docs/cluster.md's first section on a real Slurm: from a new team to an exported model."""

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
SOONER = "--slurm-init-seconds-before-status-checks 2 --latency-wait 5"


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
    paths = {
        "PATH": f"{command.parent}:{slurm.env['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    home, folder = tmp_path, tmp_path / "my_team"

    def said(block: str, place: Path = folder) -> str:
        done = subprocess.run(
            ["bash", "-euc", block],
            cwd=place,
            env=slurm.env | paths,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}{done.stderr[-5000:]}"
        return done.stdout

    laptop, clean, look, plan, submit, watch, leave, results = BLOCKS
    assert (
        "ok: my_team" in said(laptop, home)
        and (folder / "results/my_team/train/done.json").is_file()
    )
    said(clean)
    assert "gpu:fake:4" in said(look)
    assert "train" in said(plan) and not slurm.run("squeue", "-h").strip()
    log = folder / "results/my_team/logs/train.log"
    with (tmp_path / "pipeline.log").open("w") as output:
        pipeline = subprocess.Popen(
            ["bash", "-euc", f"exec {submit.strip()} {SOONER}"],
            cwd=folder,
            env=os.environ | slurm.env | paths,
            stdout=output,
            stderr=output,
        )
        try:
            wait_until(
                lambda: (
                    pipeline.poll() is not None
                    or "train: 3/40" in (log.read_text() if log.is_file() else "")
                ),
                400,
            )
            assert pipeline.poll() is None, (tmp_path / "pipeline.log").read_text()[-4000:]
            assert (
                re.search(r"RUNNING \S+ .*rule_train", shown := said(watch))
                and "my_team train: " in shown
            ), shown
            said(leave)
            [job] = [
                line.split()[0]
                for line in slurm.run("squeue", "-h", "-o", "%i %k").splitlines()
                if "train" in line
            ]
            wait_until(
                lambda: (
                    slurm.job(job)["Restarts"] == "1" and slurm.job(job)["JobState"] == "PENDING"
                ),
                120,
            )
            slurm.run(
                "scontrol", "update", f"JobId={job}", "StartTime=now+2"
            )  # Slurm's own pause is two minutes
            assert pipeline.wait(600) == 0, (tmp_path / "pipeline.log").read_text()[-4000:]
        finally:
            pipeline.terminate()
            pipeline.wait(60)
    assert (
        "continuing from results/my_team/train/checkpoints/step_" in log.read_text()
    )  # of the second job, begun anew
    assert "my_team" in said(results) and (folder / "exported" / "config.json").is_file()
