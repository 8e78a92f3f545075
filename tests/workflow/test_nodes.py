"""Runs on several Ray nodes, which are network namespaces of this machine with their own addresses and /dev/shm."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

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
# A shell's background jobs ignore SIGINT, and these tests may be one of them; the training must not.
TRAIN = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from mcore_mas.training.train import train
train(Path(sys.argv[1]), *sys.argv[2:])
"""

pytestmark = [pytest.mark.slow, pytest.mark.multirank]


@pytest.fixture(autouse=True)
def _needs_nodes(pytestconfig: pytest.Config) -> None:
    """Skip the test if this machine cannot have nodes; with --nodes, fail it."""
    reason = missing()
    if not reason:
        return
    if pytestconfig.getoption("--nodes"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def takes_minutes(request: pytest.FixtureRequest) -> None:
    """Skip the test without --nodes."""
    if not request.config.getoption("--nodes"):
        pytest.skip("takes minutes; `make test-nodes` runs it")


def comparable_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of the finished steps, without times and queue lengths."""
    path = run / "train" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    varying = ("time/", "engine_pause_s", "hand_over_s", "device_s", "tflops", "queue")
    rows = []
    for line in lines:
        row = json.loads(line)
        names = [name for name in row if not any(part in name for part in varying)]
        rows.append({name: row[name] for name in names})
    return rows


def model_digests(run: Path) -> dict[str, str]:
    files = sorted((run / "train" / "models").rglob("*.safetensors"))
    return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def results_of(run: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the digests of the finished models and the metrics."""
    return model_digests(run), comparable_metrics(run)


def results_on_one_node(run: Path, results: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Train a copy of the run on this machine alone; return its results."""
    copy = results / "alone" / run.name
    shutil.copytree(run, copy)
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["results"] = str(results / "alone")
    values["cluster"] |= {"address": "local", "nodes": {}}
    (copy / "config.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-c", TRAIN, str(copy / "config.yaml")]
    subprocess.run(command, check=True, cwd=ROOT)
    return results_of(copy)


def start_training(nodes: Nodes, run: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the training of a run, with its driver on the first node."""
    command = [sys.executable, "-c", TRAIN, str(run / "config.yaml"), nodes.ray]
    return nodes.start(1, command, ROOT, log)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT to the Python process that nsenter runs on a node; wait for its end."""
    (python,) = (
        child for child in psutil.Process(process.pid).children() if "python" in child.name()
    )
    python.send_signal(signal.SIGINT)
    process.wait(60)


@contextmanager
def training(nodes: Nodes, run: Path, log: Path) -> Iterator[Callable[[], str]]:
    """Train a run during this block; yield a function that waits for its end and returns its log."""
    process = start_training(nodes, run, log)

    def wait_for_end() -> str:
        assert process.wait(400) == 0, log.read_text()[-3000:]
        return log.read_text()

    try:
        yield wait_for_end
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], seconds: float, description: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{description}: not within {seconds:g} s"
        time.sleep(0.05)


def wait_for_first_step(run: Path, seconds: float = 250) -> None:
    """Wait for the metrics of the validation at the start and of the first step."""
    wait_until(lambda: len(comparable_metrics(run)) == 2, seconds, "the first step")


def wait_for_loss(log: Path) -> None:
    """Wait until the driver notices that a node is lost."""
    wait_until(lambda: "waiting for nodes" in log.read_text(), 120, "the loss is noticed")


# Program that updates with one rank on each of two nodes and prints its results as JSON
UPDATE_ON_TWO_NODES = """
import asyncio, json, sys
from pathlib import Path
import psutil, ray
from mcore_mas.packing.pack import pack
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.planning.worker_groups import WorkerGroup
from mcore_mas.runtime.cluster import joined_ray
from mcore_mas.runtime.errors import ClusterError
from mcore_mas.runtime.devices import RunDevices
from mcore_mas.runtime.placement import DevicePlacement
from rollout.base.ownership import owned
from tests.support import ranks, reference

folder = Path(sys.argv[1])
address = sys.argv[2]

# Each node has its own /dev/shm, which therefore cannot be a run folder.
with owned(Path("/dev/shm")):
    try:
        with joined_ray(address, Path("/dev/shm/lock.json")):
            pass
    except ClusterError as error:
        refusal = str(error)

def listening_addresses():
    pids = set()
    for process in psutil.process_iter(["cmdline"]):
        if "TrainerRank" in " ".join(process.info["cmdline"] or ()):
            pids.add(process.pid)
    connections = psutil.net_connections("tcp")
    return {c.laddr for c in connections if c.status == "LISTEN" and c.pid in pids}

async def node_addresses(group):
    return [await rank.node_address.remote() for rank in group._ranks._actors]

async def update(group):
    await node_addresses(group)  # the ranks have started
    before = listening_addresses()  # those of Ray, which asks for its token
    await group.ready()
    listening = sorted({address for address, port in listening_addresses() - before})
    rank_addresses = await node_addresses(group)
    return rank_addresses, listening, await group.update(pack(reference.make_samples(), 12))

with owned(folder), joined_ray(address, folder / "lock.json") as nodes:
    workers = WorkerGroup(policy="p", part="trainer", devices=2)
    (driver,) = [node.id for node in nodes if node.is_driver]
    devices = RunDevices(
        device_type="CPU",
        pool="split",
        worker_groups=[workers],
        nodes={node.id: node.cpus for node in nodes},
        driver_node=driver,
    )
    placement = DevicePlacement(devices)
    placement.fill()
    spec = ranks.make_spec(str(folder / "model"), dp=2)
    options = placement.options["p", "trainer"]
    group = TrainerGroup("p", spec, threads=1, actor_options=options)
    rank_addresses, listening, metrics = asyncio.run(update(group))

results = {
    "refusal": refusal,
    "nodes": [node.address for node in nodes],
    "ranks": rank_addresses,
    "listening": listening,
    "grad_norm": metrics["grad_norm"],
}
print(json.dumps(results))
"""


def test_ranks_on_two_nodes_update_as_one_process(tmp_path: Path) -> None:
    model = reference.make_model("qwen2", tmp_path / "model")
    log = tmp_path / "log"
    with nodes_of(tmp_path, [1, 1]) as nodes:
        command = [sys.executable, "-c", UPDATE_ON_TWO_NODES, str(tmp_path), nodes.ray]
        process = nodes.start(1, command, ROOT, log)
        try:
            assert process.wait(240) == 0, log.read_text()[-3000:]
        finally:
            process.kill()
        results = json.loads(log.read_text().splitlines()[-1])
        addresses = [nodes.address(1), nodes.address(2)]
    assert results["nodes"] == addresses
    assert results["ranks"] == addresses
    assert results["refusal"].startswith(
        f"cluster.address: node {addresses[1]} does not see /dev/shm/lock.json; all nodes need"
    )
    # Gloo and the store listen at the node's address only, and not at 0.0.0.0.
    assert results["listening"] == [addresses[0]]
    expected = precision.expect(model, reference.make_samples(), 1, ranks.LR)
    bound = precision.bound(expected.float32.norm)
    assert results["grad_norm"] == pytest.approx(expected.steps[0]["norm"], rel=bound)


@pytest.mark.usefixtures("takes_minutes")
def test_a_training_that_loses_a_node_of_its_ranks_gives_the_same_bits(tmp_path: Path) -> None:
    ranks_on_both_nodes = [
        "policies.solver.tp=1",
        "+policies.solver.dp=2",
        "+cluster.pool=shared",
        "trainer.steps=3",
    ]
    run = make_run(tmp_path, *SETTINGS, *ranks_on_both_nodes)
    log = tmp_path / "log"
    with nodes_of(tmp_path, [1, 1]) as nodes, training(nodes, run, log) as wait_for_end:
        wait_for_first_step(run, seconds=200)
        nodes.cut(2)  # during the second step
        wait_for_loss(log)
        nodes.start_ray(nodes.add(), 1)
        output = wait_for_end()
    lost = f"lost node {nodes.address(2)}"
    assert f"{lost}; trainers start again from the newest checkpoint, 2 restarts left" in output
    assert "cluster.pool: shared needs 2 CPUs (" in output
    assert "), and there are 1; " in output
    assert results_of(run) == results_on_one_node(run, tmp_path)


@pytest.mark.usefixtures("takes_minutes")
def test_engines_on_other_nodes_survive_the_loss_of_a_trainers_node(tmp_path: Path) -> None:
    run = make_run(tmp_path, *SETTINGS, "policies.solver.tp=2", "trainer.steps=3")
    log = tmp_path / "log"
    with nodes_of(tmp_path, [2, 2, 2]) as nodes, training(nodes, run, log) as wait_for_end:
        wait_for_first_step(run)
        rank_counts = {number: len(nodes.running(number, "TrainerRank")) for number in (1, 2, 3)}
        # The two ranks of the solver are on one node, because they share tensors.
        lost = 2 if rank_counts[2] == 2 else 3
        assert rank_counts[lost] == 2
        remaining = [number for number in (1, 2, 3) if number != lost]
        assert sum(rank_counts[number] for number in remaining) == 1  # the verifier's rank
        engines = [nodes.running(number, "EngineActor") for number in remaining]
        assert sum(len(pids) for pids in engines) == 2
        assert len(nodes.running(1, "EngineActor")) == 2

        nodes.kill(lost)
        wait_for_loss(log)
        nodes.start_ray(nodes.add(), 2)
        wait_until(lambda: len(comparable_metrics(run)) == 3, 250, "the second step")
        assert [nodes.running(number, "EngineActor") for number in remaining] == engines
        output = wait_for_end()
    assert f"lost node {nodes.address(lost)}; trainers start again" in output
    assert results_of(run) == results_on_one_node(run, tmp_path)


@pytest.mark.usefixtures("takes_minutes")
def test_trainers_run_on_nodes_with_their_label_and_engines_beside_the_driver(
    tmp_path: Path,
) -> None:
    run = make_run(
        tmp_path,
        *SETTINGS,
        "+cluster.nodes.solver.train=big",
        "+cluster.nodes.verifier.train=big",
        "+cluster.address=auto",
        "+policies.solver.overrides.engine.replicas=2",
        "+engine.deterministic=true",
        "policies.solver.tp=1",
        "trainer.steps=3",
    )
    refused_log = tmp_path / "refused"
    with ExitStack() as stack:
        nodes = Nodes(tmp_path)
        stack.callback(nodes.close)
        nodes.start_ray(nodes.add(), 3, "small")
        refused = start_training(nodes, run, refused_log)
        assert refused.wait(120) == 1

        nodes.start_ray(nodes.add(), 2, "big")
        wait_for_end = stack.enter_context(training(nodes, run, tmp_path / "log"))
        wait_for_first_step(run)
        assert nodes.running(1, "TrainerRank") == []
        assert len(nodes.running(2, "TrainerRank")) == 2
        engines = nodes.running(1, "EngineActor")
        assert len(engines) == 3
        os.kill(engines[0], signal.SIGKILL)
        output = wait_for_end()
    assert (
        refused_log.read_text()
        .splitlines()[-1]
        .endswith(
            "cluster.nodes.solver: no node has the label pool=big for its trainer (there are small); "
            "start one with `ray start --labels pool=big`"
        )
    )
    assert "the engine's actor died; started again" in output
    assert "trainers start again" not in output
    assert results_of(run) == results_on_one_node(run, tmp_path)


def server_addresses(nodes: Nodes, number: int) -> list[str]:
    """Return HOST:PORT of each fake SGLang server on a node, from the servers' command lines."""
    addresses = []
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if "sglang.launch_server" in arguments:
            host = arguments[arguments.index("--host") + 1]
            if host == nodes.address(number):
                addresses.append(f"{host}:{arguments[-1]}")
    return sorted(addresses)


# Program that prints the status of a POST request: URL, header name, header value
POST = """
import sys, httpx
print(httpx.post(sys.argv[1], json={}, headers=dict([sys.argv[2:]])).status_code)
"""


def post_status(nodes: Nodes, url: str, key: str) -> int:
    """Return the status of a POST request from the first node with this API key."""
    command = [sys.executable, "-c", POST, url, "Authorization", f"Bearer {key}"]
    return int(subprocess.check_output(nodes.on(1, command, ROOT), text=True))


@pytest.mark.usefixtures("takes_minutes")
def test_servers_on_other_nodes_get_weights_and_a_lost_one_is_started_elsewhere(
    tmp_path: Path,
) -> None:
    run = make_run(
        tmp_path,
        *SETTINGS,
        "engine=sglang",
        f"engine.python={ROOT}/tests/support/fake_sglang.py",
        "engine.max_length=512",
        "+cluster.nodes.solver={train: big, rollout: small}",
        "+cluster.nodes.verifier={train: big, rollout: small}",
        "+cluster.address=auto",
        "policies.solver.tp=1",
        "+policies.solver.overrides.engine.replicas=2",
        # Every policy learns, whatever the fake server replies.
        "reward.name=tests.support.rewards:by_number",
        # The log-probabilities of the fake server are of no model.
        "trainer.agreement={mean: 99, k3: 1.0e+9, p99: 99, max: 99}",
        "trainer.steps=4",
    )
    with ExitStack() as stack:
        nodes = Nodes(tmp_path)
        stack.callback(nodes.close)
        for cpus, label in ((2, "big"), (2, "small"), (1, "small")):
            nodes.start_ray(nodes.add(), cpus, label)
        wait_for_end = stack.enter_context(training(nodes, run, tmp_path / "log"))
        wait_for_first_step(run)
        addresses = {number: server_addresses(nodes, number) for number in (1, 2, 3)}
        assert [len(addresses[number]) for number in (1, 2, 3)] == [0, 2, 1]

        # Each server refuses all API keys but one, which only this user can read.
        key_files = list((run / "train/engines").glob("*.key.yaml"))
        assert {path.stat().st_mode & 0o777 for path in key_files} == {0o600}
        keys = ["made up", *(path.read_text().split('"')[1] for path in key_files)]
        url = f"http://{addresses[3][0]}/seen"
        assert {post_status(nodes, url, key) for key in keys} == {200, 401}

        nodes.cut(3)
        nodes.start_ray(nodes.add(), 1, "small")
        output = wait_for_end()
        assert server_addresses(nodes, 4) == []  # the run has ended its server
    lost = f"the server at http://{addresses[3][0]} is gone with its actor"
    assert f"{lost}; starting it again, 1 restarts left" in output
    assert "trainers start again" not in output
    assert len(comparable_metrics(run)) == 5
    for server in ("solver.0", "solver.1", "verifier.0"):
        lines = (run / f"train/engines/{server}.log").read_text().splitlines()
        versions = [int(line.split()[1]) for line in lines if line.startswith("version ")]
        assert versions[-1] == 4, lines
        assert sorted(versions) == versions


# Program that prints the resources of a Ray cluster as JSON
CLUSTER_RESOURCES = """
import json, sys, ray
from ray.util.placement_group import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False)
groups = [group["state"] for group in placement_group_table().values()]
resources = {
    "has_placement_groups": any(state != "REMOVED" for state in groups),
    "free_cpus": ray.available_resources()["CPU"],
    "cpus": ray.cluster_resources()["CPU"],
    "nodes": sum(node["Alive"] for node in ray.nodes()),
}
print(json.dumps(resources))
"""
FAKE_SERVER = ["sleep", "599"]


def fake_server_pids() -> list[int]:
    """Return the process ids of the servers that only sleep, on all nodes."""
    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if process.info["cmdline"] == FAKE_SERVER]


def make_sleeping_server(path: Path) -> None:
    """Write a program that stands for SGLang's interpreter, and never serves."""
    path.write_text(f"#!/bin/sh\nexec {shlex.join(FAKE_SERVER)}\n")
    path.chmod(0o755)


@pytest.mark.usefixtures("takes_minutes")
def test_two_runs_share_a_cluster_and_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    settings = [
        "policies.solver.tp=1",
        "+cluster.pool=shared",
        "trainer.steps=6",
        "+engine.deterministic=true",
    ]
    server = tmp_path / "python"
    make_sleeping_server(server)
    sglang_settings = [
        "engine=sglang",
        "engine.max_length=512",
        f"engine.python={server}",
        "engine.deterministic=false",
    ]
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    first = make_run(tmp_path / "first", *SETTINGS, *settings)
    second = make_run(tmp_path / "second", *SETTINGS, *settings)
    third = make_run(tmp_path / "third", *SETTINGS, *settings, *sglang_settings)
    first_log = tmp_path / "first.log"
    resources_log = tmp_path / "resources"
    with (
        nodes_of(tmp_path, [1, 1]) as nodes,
        training(nodes, second, tmp_path / "second.log") as wait_for_end,
    ):
        # The first run is interrupted after its first checkpoint, and continued.
        process = start_training(nodes, first, first_log)
        checkpoints = first / "train" / "checkpoints"
        wait_until(
            lambda: any(checkpoints.glob("step_*/manifest.json")), 250, "the first checkpoint"
        )
        interrupt(process)
        process = start_training(nodes, first, first_log)
        assert process.wait(250) == 0, first_log.read_text()[-3000:]
        wait_for_end()

        # The third run is interrupted while its server starts.
        process = start_training(nodes, third, tmp_path / "third.log")
        wait_until(lambda: bool(fake_server_pids()), 120, "a server starts")
        interrupt(process)
        wait_until(lambda: not fake_server_pids(), 30, "no server is left")
        command = [sys.executable, "-c", CLUSTER_RESOURCES, nodes.ray]
        nodes.start(1, command, ROOT, resources_log).wait(60)
        for number in (1, 2):
            for actor in ("TrainerRank", "EngineActor", "Server"):
                assert nodes.running(number, actor) == []
            find = ["find", "/dev/shm", "-path", "*mcore*", "-type", "f"]
            assert not subprocess.check_output(nodes.on(number, find, ROOT))
    assert json.loads(resources_log.read_text().splitlines()[-1]) == {
        "has_placement_groups": False,
        "free_cpus": 2.0,
        "cpus": 2.0,
        "nodes": 2,
    }
    assert "continuing from" in first_log.read_text()
    assert results_of(first) == results_of(second)
    assert results_of(first) == results_on_one_node(first, tmp_path)


def page_commands() -> tuple[list[str], list[str]]:
    """Return the exported variables and the commands of docs/cluster.md that start a Ray cluster."""
    page = (ROOT / "docs" / "cluster.md").read_text().replace("10.0.0.", "10.77.0.")
    section = page.partition("## Several nodes with Ray\n")[2].partition("\n## ")[0]
    variables = re.findall(r"^export (\S+)", section, re.MULTILINE)
    commands = re.findall(r"^(ray .*?)(?: +#.*)?$", section, re.MULTILINE)
    return variables, commands


@pytest.mark.usefixtures("takes_minutes")
def test_the_pages_commands_start_a_cluster_that_trains_and_end_it(tmp_path: Path) -> None:
    variables, commands = page_commands()
    get_token, start_head, join, join_with_label = commands
    assert "--labels" in join_with_label
    run = make_run(
        tmp_path,
        *SETTINGS,
        "+cluster.address=auto",
        "+cluster.nodes.verifier={train: small}",
        "policies.solver.tp=1",
        "trainer.steps=1",
    )
    # All nodes have one home folder. Ray's settings are those of the page.
    environment = [
        "env",
        "-u",
        "RAY_AUTH_MODE",
        "-u",
        "RAY_AUTH_TOKEN_PATH",
        *variables,
        f"HOME={tmp_path}",
        f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}",
    ]
    with ExitStack() as stack:
        nodes = Nodes(tmp_path)
        stack.callback(nodes.close)

        def run_on(number: int, command: Sequence[str]) -> None:
            log = tmp_path / "output"
            status = nodes.start(number, [*environment, *command], ROOT, log).wait(300)
            assert status == 0, (command, log.read_text()[-3000:])

        nodes.add()
        run_on(1, shlex.split(get_token))
        run_on(1, shlex.split(start_head))
        run_on(nodes.add(), shlex.split(join))
        run_on(nodes.add(), shlex.split(join_with_label))
        run_on(1, ["mcore-mas", "train", str(run)])
        for number in (1, 2, 3):
            run_on(number, ["ray", "stop"])
            list_processes = nodes.on(number, ["ps", "-eo", "stat=,comm="], ROOT)
            processes = subprocess.check_output(list_processes, text=True)
            # Zombies do not count, because no process of a node reaps them.
            assert not re.findall(r"^[^Z]\S* +(raylet|gcs_server)$", processes, re.MULTILINE)
    assert len(comparable_metrics(run)) == 2  # the validation at the start, and a step
