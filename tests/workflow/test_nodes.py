"""A run on several nodes of a Ray: network namespaces of this machine with addresses and memory of their own."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import precision, ranks, reference
from tests.support.nodes import Nodes, missing, nodes_of
from tests.support.run_folder import make_run

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    "data.validation=1",
    "trainer.checkpoint_every=1",
    "trainer.validate_every=100",
    "reward.name=tests.support.rewards:by_first_token",
    "~reward.penalties",
    "tracking.traces=0",
]
TRAIN = "import sys; from pathlib import Path; from mcore_mas.training.train import train; train(Path(sys.argv[1]){})"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multirank,
    pytest.mark.skipif(bool(missing()), reason=missing() or "nodes can be made here"),
]


def rows(run: Path) -> list[dict[str, Any]]:
    """The finished steps of a run, without what its clock says."""
    path = run / "train" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [json.loads(line) for line in lines]
    clocks = ("time/", "engine_pause_s", "hand_over_s", "queue")
    return [{key: row[key] for key in row if not any(word in key for word in clocks)} for row in kept]


def digests(run: Path) -> dict[str, str]:
    files = sorted((run / "train" / "models").rglob("*.safetensors"))
    return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def trained_here(run: Path, results: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """What the run comes to on one node, in a copy of its folder."""
    copy = results / "alone" / run.name
    shutil.copytree(run, copy)
    text = (run / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace(f"results: {results}", f"results: {results / 'alone'}"))
    subprocess.run([sys.executable, "-c", TRAIN.format(""), str(copy / "config.yaml")], check=True, cwd=ROOT)
    return digests(copy), rows(copy)


@contextmanager
def training(nodes: Nodes, run: Path, log: Path) -> Iterator[Callable[[], str]]:
    """The run trains, from the first node; what it gives waits for its end and says what it wrote."""
    command = [sys.executable, "-c", TRAIN.format(", sys.argv[2]"), str(run / "config.yaml"), nodes.ray]
    process = nodes.start(1, command, ROOT, log)

    def ended() -> str:
        assert process.wait(400) == 0, log.read_text()[-3000:]
        return log.read_text()

    try:
        yield ended
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


@pytest.fixture
def long(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--nodes"):
        pytest.skip("takes minutes; `make test-nodes` runs it")


GANG = """
import asyncio, json, sys
from pathlib import Path
import psutil, ray
from mcore_mas.packing.pack import pack
from mcore_mas.megatron.step.trainer_group import TrainerGroup
from mcore_mas.planning.jobs import Tenant
from mcore_mas.training.cluster import ClusterError, joined_ray
from mcore_mas.training.placement import DevicePlacement, Room
from rollout.base.files import owned
from tests.support import ranks, reference

folder, address = Path(sys.argv[1]), sys.argv[2]
with owned(Path("/dev/shm")):  # every node has its own
    try:
        with joined_ray(address, Path("/dev/shm")):
            pass
    except ClusterError as error:
        refused = str(error)
with owned(folder), joined_ray(address, folder) as nodes:
    tenant = Tenant(policy="p", part="trainer", devices=2)
    devices = {node.id: node.cpus for node in nodes}
    placement = DevicePlacement(Room(kind="CPU", pool="split", tenants=[tenant], nodes=devices), joined=True)
    placement.fill()
    spec = ranks.spec_of(str(folder / "model"), dp=2)
    group = TrainerGroup("p", spec, threads=1, places=placement.options["p", "trainer"])

    async def play():
        [await rank.seat.remote() for rank in group._ranks]
        before = listeners()  # Ray's own, which asks for its token
        await group.ready()
        heard = sorted({address for address, port in listeners() - before})
        seats = [await rank.seat.remote() for rank in group._ranks]
        return seats, heard, await group.update(pack(reference.make_samples(), 12))

    def listeners():
        own = pids()
        return {c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in own}

    def pids():
        return {p.pid for p in psutil.process_iter() if "_Rank" in " ".join(p.cmdline())}

    seats, heard, metrics = asyncio.run(play())
print(json.dumps({"refused": refused, "nodes": [n.address for n in nodes], "seats": seats, "heard": heard,
                  "norm": metrics["grad_norm"]}))
"""


def test_a_gang_across_two_nodes_updates_as_one_process_would(tmp_path: Path) -> None:
    model = reference.make_model("qwen2", tmp_path / "model")
    with nodes_of(tmp_path, [1, 1]) as nodes:
        command = [sys.executable, "-c", GANG, str(tmp_path), nodes.ray]
        process = nodes.start(1, command, ROOT, tmp_path / "log")
        try:
            assert process.wait(240) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            process.kill()
        said = json.loads((tmp_path / "log").read_text().splitlines()[-1])
        first, second = nodes.address(1), nodes.address(2)
    assert said["nodes"] == [first, second]
    assert said["seats"] == [[first, []], [second, []]]  # rank 0 is on the first
    assert said["refused"].startswith(f"cluster.address: node {second} does not see /dev/shm/lock.json; all nodes need")
    assert said["heard"] == [first]  # gloo and the store: nothing listens everywhere
    expected = precision.expect(model, reference.make_samples(), 1, ranks.LR)
    assert said["norm"] == pytest.approx(expected.steps[0]["norm"], rel=precision.bound(expected.own.norm))


@pytest.mark.usefixtures("long")
def test_a_gang_across_two_nodes_loses_one_and_ends_as_it_would_have(tmp_path: Path) -> None:
    across = ["policies.solver.tp=1", "+policies.solver.dp=2", "+cluster.pool=shared", "trainer.steps=3"]
    run = make_run(tmp_path, *SETTINGS, *across)
    log = tmp_path / "log"
    with nodes_of(tmp_path, [1, 1]) as nodes, training(nodes, run, log) as ended:
        until(lambda: len(rows(run)) == 2, 200, "the first step")  # after the validation at the start
        nodes.cut(2)  # in the middle of the second
        until(lambda: "waiting for nodes" in log.read_text(), 120, "the loss is noticed")
        nodes.start_ray(nodes.add(), 1)
        said = ended()
    assert f"lost node {nodes.address(2)}; trainers start again from the newest checkpoint, 2 restarts left" in said
    assert "cluster.pool: shared needs 2 CPUs and there are 1" in said
    assert (digests(run), rows(run)) == trained_here(run, tmp_path)


@pytest.mark.usefixtures("long")
def test_engines_elsewhere_go_on_when_trainers_lose_their_node(tmp_path: Path) -> None:
    run = make_run(tmp_path, *SETTINGS, "policies.solver.tp=2", "trainer.steps=3")
    with nodes_of(tmp_path, [1, 2, 2]) as nodes, training(nodes, run, tmp_path / "log") as ended:
        until(lambda: len(rows(run)) == 2, 250, "the first step")
        ranks_at = {number: len(nodes.running(number, "_Rank")) for number in (1, 2, 3)}
        lost = next(number for number in (2, 3) if ranks_at[number] == 2)  # the solver's: they share tensors
        others = [number for number in (1, 2, 3) if number != lost]
        assert sum(ranks_at[number] for number in others) == 1  # the verifier's
        engines = [nodes.running(number, "Host") for number in others]
        assert sum(map(len, engines)) == 2
        nodes.kill(lost)
        until(lambda: "waiting for nodes" in (tmp_path / "log").read_text(), 120, "the loss is noticed")
        nodes.start_ray(nodes.add(), 2)
        until(lambda: len(rows(run)) == 3, 250, "the second step")
        assert [nodes.running(number, "Host") for number in others] == engines
        said = ended()
    assert f"lost node {nodes.address(lost)}; trainers start again" in said
    assert (digests(run), rows(run)) == trained_here(run, tmp_path)
