"""A run on several nodes of a Ray: network namespaces of this machine with addresses and memory of their own."""

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
from collections.abc import Callable, Iterator
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
# Ctrl-C ends it also where whoever started these tests ignores SIGINT, as a shell's background jobs do
TRAIN = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from pathlib import Path; "
TRAIN += "from mcore_mas.training.train import train; train(Path(sys.argv[1]){})"

pytestmark = [pytest.mark.slow, pytest.mark.multirank]


@pytest.fixture(autouse=True)
def can_be_made(pytestconfig: pytest.Config) -> None:
    """Without nodes these tests are skipped; with --nodes they fail."""
    if why := missing():
        (pytest.fail if pytestconfig.getoption("--nodes") else pytest.skip)(why)


def rows(run: Path) -> list[dict[str, Any]]:
    """The finished steps of a run, without what its clock says."""
    path = run / "train" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [json.loads(line) for line in lines]
    clocks = ("time/", "engine_pause_s", "hand_over_s", "device_s", "tflops", "queue")
    return [
        {key: row[key] for key in row if not any(word in key for word in clocks)} for row in kept
    ]


def digests(run: Path) -> dict[str, str]:
    files = sorted((run / "train" / "models").rglob("*.safetensors"))
    return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def trained_here(run: Path, results: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """What the run comes to on one node, in a copy of its folder."""
    copy = results / "alone" / run.name
    shutil.copytree(run, copy)
    values = yaml.safe_load((run / "config.yaml").read_text()) | {"results": str(results / "alone")}
    values["cluster"] |= {"address": "local", "nodes": {}}
    (copy / "config.yaml").write_text(yaml.safe_dump(values))
    subprocess.run(
        [sys.executable, "-c", TRAIN.format(""), str(copy / "config.yaml")], check=True, cwd=ROOT
    )
    return digests(copy), rows(copy)


def train_on(nodes: Nodes, run: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the run from the first node."""
    command = [
        sys.executable,
        "-c",
        TRAIN.format(", sys.argv[2]"),
        str(run / "config.yaml"),
        nodes.ray,
    ]
    return nodes.start(1, command, ROOT, log)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C for what nsenter runs on the node, and wait for its end."""
    [python] = [p for p in psutil.Process(process.pid).children() if "python" in p.name()]
    python.send_signal(signal.SIGINT)
    process.wait(60)


@contextmanager
def training(nodes: Nodes, run: Path, log: Path) -> Iterator[Callable[[], str]]:
    """The run trains, from the first node; what it gives waits for its end and says what it wrote."""
    process = train_on(nodes, run, log)

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
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.planning.worker_groups import WorkerGroup
from mcore_mas.runtime.cluster import joined_ray
from mcore_mas.runtime.errors import ClusterError
from mcore_mas.runtime.devices import RunDevices
from mcore_mas.runtime.placement import DevicePlacement
from rollout.base.ownership import owned
from tests.support import ranks, reference

folder, address = Path(sys.argv[1]), sys.argv[2]
with owned(Path("/dev/shm")):  # every node has its own
    try:
        with joined_ray(address, Path("/dev/shm/lock.json")):
            pass
    except ClusterError as error:
        refused = str(error)
with owned(folder), joined_ray(address, folder / 'lock.json') as nodes:
    workers = WorkerGroup(policy="p", part="trainer", devices=2)
    devices = {node.id: node.cpus for node in nodes}
    [driver] = [node.id for node in nodes if node.is_driver]
    placement = DevicePlacement(
        RunDevices(device_type="CPU", pool="split", worker_groups=[workers], nodes=devices, driver_node=driver)
    )
    placement.fill()
    spec = ranks.make_spec(str(folder / "model"), dp=2)
    group = TrainerGroup("p", spec, threads=1, actor_options=placement.options["p", "trainer"])

    async def play():
        [await rank.node_address.remote() for rank in group._ranks._actors]
        before = listeners()  # Ray's own, which asks for its token
        await group.ready()
        heard = sorted({address for address, port in listeners() - before})
        ranks_at = [await rank.node_address.remote() for rank in group._ranks._actors]
        return ranks_at, heard, await group.update(pack(reference.make_samples(), 12))

    def listeners():
        own = pids()
        return {c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in own}

    def pids():
        return {p.pid for p in psutil.process_iter() if "TrainerRank" in " ".join(p.cmdline())}

    ranks_at, heard, metrics = asyncio.run(play())
print(json.dumps({"refused": refused, "nodes": [n.address for n in nodes], "ranks": ranks_at, "heard": heard,
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
    assert said["ranks"] == [first, second]
    assert said["refused"].startswith(
        f"cluster.address: node {second} does not see /dev/shm/lock.json; all nodes need"
    )
    assert said["heard"] == [first]  # gloo and the store: nothing listens everywhere
    expected = precision.expect(model, reference.make_samples(), 1, ranks.LR)
    assert said["norm"] == pytest.approx(
        expected.steps[0]["norm"], rel=precision.bound(expected.float32.norm)
    )


@pytest.mark.usefixtures("long")
def test_a_gang_across_two_nodes_loses_one_and_ends_as_it_would_have(tmp_path: Path) -> None:
    across = [
        "policies.solver.tp=1",
        "+policies.solver.dp=2",
        "+cluster.pool=shared",
        "trainer.steps=3",
    ]
    run = make_run(tmp_path, *SETTINGS, *across)
    log = tmp_path / "log"
    with nodes_of(tmp_path, [1, 1]) as nodes, training(nodes, run, log) as ended:
        until(
            lambda: len(rows(run)) == 2, 200, "the first step"
        )  # after the validation at the start
        nodes.cut(2)  # in the middle of the second
        until(lambda: "waiting for nodes" in log.read_text(), 120, "the loss is noticed")
        nodes.start_ray(nodes.add(), 1)
        said = ended()
    assert (
        f"lost node {nodes.address(2)}; trainers start again from the newest checkpoint, 2 restarts left"
        in said
    )
    assert "cluster.pool: shared needs 2 CPUs and there are 1" in said
    assert (digests(run), rows(run)) == trained_here(run, tmp_path)


@pytest.mark.usefixtures("long")
def test_engines_elsewhere_go_on_when_trainers_lose_their_node(tmp_path: Path) -> None:
    run = make_run(tmp_path, *SETTINGS, "policies.solver.tp=2", "trainer.steps=3")
    with nodes_of(tmp_path, [2, 2, 2]) as nodes, training(nodes, run, tmp_path / "log") as ended:
        until(lambda: len(rows(run)) == 2, 250, "the first step")
        ranks_at = {number: len(nodes.running(number, "TrainerRank")) for number in (1, 2, 3)}
        lost = next(
            number for number in (2, 3) if ranks_at[number] == 2
        )  # the solver's: they share tensors
        others = [number for number in (1, 2, 3) if number != lost]
        assert sum(ranks_at[number] for number in others) == 1  # the verifier's
        engines = [nodes.running(number, "Host") for number in others]
        assert sum(map(len, engines)) == len(nodes.running(1, "Host")) == 2
        nodes.kill(lost)
        until(
            lambda: "waiting for nodes" in (tmp_path / "log").read_text(),
            120,
            "the loss is noticed",
        )
        nodes.start_ray(nodes.add(), 2)
        until(lambda: len(rows(run)) == 3, 250, "the second step")
        assert [nodes.running(number, "Host") for number in others] == engines
        said = ended()
    assert f"lost node {nodes.address(lost)}; trainers start again" in said
    assert (digests(run), rows(run)) == trained_here(run, tmp_path)


@pytest.mark.usefixtures("long")
def test_trainers_are_on_nodes_with_their_label_and_engines_with_the_command(
    tmp_path: Path,
) -> None:
    settings = [f"+cluster.nodes.{policy}.train=big" for policy in ("solver", "verifier")]
    settings += [
        "+cluster.address=auto",
        "+policies.solver.own.engine.replicas=2",
        "+engine.deterministic=true",
        "policies.solver.tp=1",
        "trainer.steps=3",
    ]
    run, log = make_run(tmp_path, *SETTINGS, *settings), tmp_path / "log"
    with ExitStack() as stack:
        nodes = Nodes(tmp_path)
        stack.callback(nodes.close)
        nodes.start_ray(nodes.add(), 3, "small")
        refused = train_on(nodes, run, tmp_path / "refused")
        assert refused.wait(120) == 1
        nodes.start_ray(nodes.add(), 2, "big")
        ended = stack.enter_context(training(nodes, run, log))
        until(lambda: len(rows(run)) == 2, 250, "the first step")
        assert [len(nodes.running(number, "TrainerRank")) for number in (1, 2)] == [0, 2]
        engines = nodes.running(1, "Host")
        assert len(engines) == 3
        os.kill(engines[0], signal.SIGKILL)
        said = ended()
    last = (tmp_path / "refused").read_text().splitlines()[-1]
    assert last.endswith(
        "cluster.nodes.solver: no node has the label pool=big for its trainer (there are small); start one with "
        "`ray start --labels pool=big`"
    )
    assert "the engine's actor died; started again" in said
    assert "trainers start again" not in said
    assert (digests(run), rows(run)) == trained_here(run, tmp_path)


def served(nodes: Nodes, number: int) -> list[str]:
    """Where the stand-ins for SGLang's servers on a node listen, as their command lines say."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    own = [
        f"{line[line.index('--host') + 1]}:{line[-1]}"
        for line in lines
        if "sglang.launch_server" in line
    ]
    return sorted(place for place in own if place.startswith(f"{nodes.address(number)}:"))


ASKED = "import sys, httpx; print(httpx.post(sys.argv[1], json={}, headers=dict([sys.argv[2:]])).status_code)"


@pytest.mark.usefixtures("long")
def test_servers_on_other_nodes_take_weights_and_one_that_is_cut_off_is_started_elsewhere(
    tmp_path: Path,
) -> None:
    own = [
        "engine=sglang",
        f"engine.python={ROOT}/tests/support/fake_sglang.py",
        "engine.max_length=512",
    ]
    own += [
        f"+cluster.nodes.{policy}={{train: big, rollout: small}}"
        for policy in ("solver", "verifier")
    ]
    own += [
        "+cluster.address=auto",
        "policies.solver.tp=1",
        "+policies.solver.own.engine.replicas=2",
    ]
    own += ["reward.name=tests.support.rewards:by_number"]  # all learn, whatever the stand-in says
    own += ["trainer.agreement={mean: 99, k3: 1.0e+9, p99: 99, max: 99}"]  # they have no model
    run, log = make_run(tmp_path, *SETTINGS, *own, "trainer.steps=4"), tmp_path / "log"
    with ExitStack() as stack:
        nodes = Nodes(tmp_path)
        stack.callback(nodes.close)
        for cpus, label in ((2, "big"), (2, "small"), (1, "small")):
            nodes.start_ray(nodes.add(), cpus, label)
        ended = stack.enter_context(training(nodes, run, log))
        until(lambda: len(rows(run)) == 2, 250, "the first step")
        there = {number: served(nodes, number) for number in (1, 2, 3)}
        assert [len(places) for places in there.values()] == [0, 2, 1]
        secrets = {
            path: path.read_text().split('"')[1]
            for path in (run / "train/engines").glob("*.key.yaml")
        }
        assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
        asked = [sys.executable, "-c", ASKED, f"http://{there[3][0]}/seen"]
        statuses = {
            int(
                subprocess.check_output(
                    nodes.on(1, [*asked, "Authorization", f"Bearer {key}"], ROOT), text=True
                )
            )
            for key in ("made up", *secrets.values())
        }
        assert statuses == {200, 401}
        nodes.cut(3)
        nodes.start_ray(nodes.add(), 1, "small")
        said = ended()
        assert served(nodes, 4) == []  # the run has ended it
    assert (
        f"the server at http://{there[3][0]} is gone with its actor; started again, 1 restarts left"
        in said
    )
    assert "trainers start again" not in said
    assert len(rows(run)) == 5
    for server in ("solver.0", "solver.1", "verifier.0"):
        lines = (run / f"train/engines/{server}.log").read_text().splitlines()
        versions = [int(line.split()[1]) for line in lines if line.startswith("version ")]
        assert versions[-1] == 4, lines
        assert sorted(versions) == versions


LEFT = """
import json, sys, ray
from ray.util.placement_group import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False)
groups = [group["state"] for group in placement_group_table().values()]
free, there = ray.available_resources(), ray.cluster_resources()
print(json.dumps([{*groups} <= {"REMOVED"}, free["CPU"], there["CPU"], sum(node["Alive"] for node in ray.nodes())]))
"""


@pytest.mark.usefixtures("long")
def test_two_runs_share_a_cluster_and_one_that_is_interrupted_leaves_nothing(
    tmp_path: Path,
) -> None:
    runs = []
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
        own = [
            "policies.solver.tp=1",
            "+cluster.pool=shared",
            "trainer.steps=6",
            "+engine.deterministic=true",
        ]
        if name == "third":
            server = tmp_path / "python"
            server.write_text("#!/bin/sh\nexec sleep 599\n")
            server.chmod(0o755)
            own += [
                "engine=sglang",
                "engine.max_length=512",
                f"engine.python={server}",
                "engine.deterministic=false",
            ]
        runs.append(make_run(tmp_path / name, *SETTINGS, *own))
    first, second, third = runs
    with (
        nodes_of(tmp_path, [1, 1]) as nodes,
        training(nodes, second, tmp_path / "second.log") as ended,
    ):
        process = train_on(nodes, first, tmp_path / "first.log")
        saved = first / "train" / "checkpoints"
        until(lambda: any(saved.glob("step_*/manifest.json")), 250, "the first checkpoint")
        interrupt(process)
        process = train_on(nodes, first, tmp_path / "first.log")  # the same command goes on
        assert process.wait(250) == 0, (tmp_path / "first.log").read_text()[-3000:]
        ended()
        process = train_on(nodes, third, tmp_path / "third.log")
        until(lambda: bool(servers()), 120, "a server starts")
        interrupt(process)
        until(lambda: not servers(), 30, "no server is left")
        command = [sys.executable, "-c", LEFT, nodes.ray]
        nodes.start(1, command, ROOT, tmp_path / "left").wait(60)
        for number in (1, 2):
            assert [nodes.running(number, name) for name in ("TrainerRank", "Host", "Server")] == [
                [],
                [],
                [],
            ]
            assert not subprocess.check_output(
                nodes.on(number, ["find", "/dev/shm", "-path", "*mcore*", "-type", "f"], ROOT)
            )
    assert json.loads((tmp_path / "left").read_text().splitlines()[-1]) == [True, 2.0, 2.0, 2]
    assert "continuing from" in (tmp_path / "first.log").read_text()
    assert (digests(first), rows(first)) == (digests(second), rows(second))
    assert (digests(first), rows(first)) == trained_here(first, tmp_path)


@pytest.mark.usefixtures("long")
def test_the_pages_commands_start_a_cluster_that_trains_and_end_it(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text().replace("10.0.0.", "10.77.0.")
    page = page.partition("## Several nodes with Ray\n")[2].partition("\n## ")[0]
    token, *commands = re.findall(r"^(ray .*?)(?: +#.*)?$", page, re.MULTILINE)
    assert (len(commands), commands[2].count("--labels")) == (
        3,
        1,
    )  # a head, a node, and one with a label
    small = "+cluster.nodes.verifier={rollout: small}"
    run = make_run(
        tmp_path,
        *SETTINGS,
        "+cluster.address=auto",
        small,
        "policies.solver.tp=1",
        "trainer.steps=1",
    )
    # one home for all nodes; Ray's settings are the page's, not those of the other tests
    settings = re.findall(r"^export (\S+)", page, re.MULTILINE)
    own = ["env", "-u", "RAY_AUTH_MODE", "-u", "RAY_AUTH_TOKEN_PATH", *settings, f"HOME={tmp_path}"]
    own += [f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"]
    with ExitStack() as stack:
        nodes = Nodes(tmp_path)
        stack.callback(nodes.close)

        def said(number: int, *command: str) -> str:
            log = tmp_path / "said"
            code = nodes.start(number, [*own, *command], ROOT, log).wait(300)
            assert code == 0, (command, log.read_text()[-3000:])
            return log.read_text()

        nodes.add()
        said(1, *shlex.split(token))
        for number, command in enumerate(commands, 1):
            said(number if number == 1 else nodes.add(), *shlex.split(command))
        said(1, "mcore-mas", "train", str(run))
        for number in (1, 2, 3):
            said(number, "ray", "stop")
            listed = subprocess.check_output(
                nodes.on(number, ["ps", "-eo", "stat=,comm="], ROOT), text=True
            )
            assert not re.findall(
                r"^[^Z]\S* +(raylet|gcs_server)$", listed, re.MULTILINE
            )  # nobody reaps them there
    assert len(rows(run)) == 2  # the validation at the start and a step


def servers() -> list[int]:
    """The servers that run on the nodes."""
    found = psutil.process_iter(["cmdline"])
    return [process.pid for process in found if process.info["cmdline"] == ["sleep", "599"]]
