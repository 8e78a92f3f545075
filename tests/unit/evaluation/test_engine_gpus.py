"""GPUs of the engines in an evaluation."""

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy
from mcore_mas.evaluation import running_team as running
from mcore_mas.evaluation.engine_gpus import assign_engine_gpus, share_gpu_memory
from mcore_mas.evaluation.running_team import running_team
from mcore_mas.evaluation.seats import config_with_seats
from mcore_mas.planning.machine import visible_gpu_ids
from mcore_mas.planning.memory import engine_weight_bytes
from mcore_mas.planning.worker_groups import PlacementError
from mcore_mas.runtime.cluster import Node
from mcore_mas.runtime.devices import find_devices
from mcore_mas.runtime.engine_factory import engine_requests, make_engines
from mcore_mas.runtime.run_environments import make_sidecar
from rollout.base.errors import EngineError
from rollout.engines.embedded.build import embedded_settings, local_devices
from rollout.engines.sglang.replica import Replica
from rollout.engines.sglang.server import Server
from rollout.models.architecture import read_architecture
from tests.support.run_folder import make_run

pytestmark = pytest.mark.usefixtures("forked_programs")

POLICIES = ("solver", "verifier")
EMBEDDED = ("engine.name=embedded", "engine.python=null", "+engine.device=cuda")


def make_config(*overrides: str) -> RunConfig:
    """Return the config of a run whose engines are SGLang servers."""
    sglang = ["cluster.device=auto", "engine.name=sglang", "engine.python=p"]
    return RunConfig.from_values(resolve(["experiment=demo_math", *sglang, *overrides]), "test")


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13,14,15")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def test_all_gpus_serve() -> None:
    assert assign_engine_gpus(make_config("engine.tp=2")) == {
        "solver": [["8", "9"], ["10", "11"]],
        "verifier": [["12", "13"], ["14", "15"]],
    }
    assert [len(servers) for servers in assign_engine_gpus(make_config()).values()] == [4, 4]


def test_the_retriever_has_the_last_gpu() -> None:
    settings = [
        "engine.name=sglang",
        "engine.python=p",
        "retriever.device=cuda",
        "cluster.device=cuda",
    ]
    config = RunConfig.from_values(resolve(["experiment=demo_search", *settings]), "test")
    used = [gpu for servers in assign_engine_gpus(config).values() for (gpu,) in servers]
    assert used == ["8", "9", "10", "11", "12", "13", "14"]

    devices = find_devices(config)
    assert devices.nodes == {"": 7}
    assert devices.ray_gpus == 7
    assert config.retriever is not None
    command = make_sidecar(config.retriever, Path("index")).command
    assert command[:2] == ["env", "CUDA_VISIBLE_DEVICES=15"]

    joined_node = Node(address="10.0.0.3", id="n3", gpus=8, cpus=64)
    message = r"retriever\.device: cuda: all GPUs belong to the joined Ray"
    with pytest.raises(PlacementError, match=message):
        find_devices(config, [joined_node])


def test_a_server_with_more_gpus_than_the_machine_is_refused() -> None:
    message = r"16 GPUs for a server of solver \(engine\.tp\), and there are 8 without"
    with pytest.raises(PlacementError, match=message):
        assign_engine_gpus(make_config("engine.tp=16"))


def test_embedded_engines_use_all_gpus(tmp_path: Path) -> None:
    config = make_config(*EMBEDDED)
    gpus = assign_engine_gpus(config)
    assert gpus == {
        "solver": [["8"], ["9"], ["10"], ["11"]],
        "verifier": [["12"], ["13"], ["14"], ["15"]],
    }

    models = dict.fromkeys(config.models, "model")
    requests = engine_requests(config, models, tmp_path, trained=False, gpus=gpus)
    assert [local_devices(request) for request in requests] == [
        ["cuda:0", "cuda:1", "cuda:2", "cuda:3"],
        ["cuda:4", "cuda:5", "cuda:6", "cuda:7"],
    ]


def test_embedded_engines_on_the_cpu_use_no_gpu() -> None:
    config = make_config("engine.name=embedded", "engine.python=null", "+engine.device=cpu")
    assert assign_engine_gpus(config) == {"solver": [[]], "verifier": [[]]}


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_an_engine_without_a_device_follows_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, device: str
) -> None:
    """In a training Ray gives its actor a GPU or none; an engine that is served takes what is there."""
    config = make_config("engine.name=embedded", "engine.python=null")
    models = dict.fromkeys(config.models, "model")
    resources = {"num_gpus": 0.5, "num_cpus": 0} if has_gpu else {"num_cpus": 0.5}
    placements = {policy: [resources] for policy in models}
    trained = engine_requests(config, models, tmp_path, trained=True, placements=placements)
    assert [embedded_settings(request).device for request in trained] == [device, device]

    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    served = engine_requests(config, models, tmp_path, trained=False)
    assert [local_devices(request) for request in served] == [[device], [device]]


def test_with_fewer_gpus_than_engines_need_they_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = make_config("policies.solver.overrides.engine.tp=2")
    assert assign_engine_gpus(config) == {"solver": [["8", "9"]], "verifier": [["8"]]}

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for config in (make_config(), make_config(*EMBEDDED)):
        assert assign_engine_gpus(config) == {"solver": [["8"]], "verifier": [["8"]]}


class TestSharedMemory:
    """Two adapters on one base: one server in the training, two on one GPU in the evaluation."""

    GPUS = {"solver": [["8"]], "verifier": [["8"]]}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def one_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        return make_run(tmp_path, "data.test=1") / "base"

    def make_config(self, model: Path, *overrides: str) -> RunConfig:
        adapter = "lora: {rank: 4, alpha: 8}, share_base: true, tp: 1, lr: 1.0e-3"
        return make_config(
            "cluster.pool=shared",
            "engine.adapters=slots",
            "cold_start=null",
            *(f"++policies.{policy}={{{adapter}, model: {model}}}" for policy in POLICIES),
            *overrides,
        )

    def shares(
        self, config: RunConfig, gpu_bytes: float, monkeypatch: pytest.MonkeyPatch
    ) -> dict[str, Any]:
        """Return each server's share of a GPU's memory."""
        properties = SimpleNamespace(total_memory=gpu_bytes)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
        shared = share_gpu_memory(config, self.GPUS)
        return {
            policy: for_policy(shared, policy).engine.options["mem-fraction-static"]
            for policy in POLICIES
        }

    def test_servers_get_equal_shares(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = self.make_config(model, "+engine.options.mem-fraction-static=0.6")
        # the training fits the GPU
        find_devices(config, [Node(address="10.0.0.3", id="n3", gpus=1, cpus=64)])
        assert assign_engine_gpus(config) == self.GPUS
        weight_bytes = engine_weight_bytes(read_architecture(model), 1)
        # four fifths of the memory in two parts; both have the same weights
        assert self.shares(config, 10 * weight_bytes, monkeypatch) == {
            "solver": 0.4,
            "verifier": 0.4,
        }
        message = r"2 engines on one GPU of .* GB, and they hold solver .*, verifier"
        with pytest.raises(PlacementError, match=message):
            self.shares(config, 2.4 * weight_bytes, monkeypatch)

    def test_valid_shares_of_the_config_are_kept(self, model: Path) -> None:
        config = self.make_config(model, "+engine.options.mem-fraction-static=0.3")
        assert share_gpu_memory(config, self.GPUS) is config

    def test_servers_on_gpus_of_their_own_need_no_share(self, model: Path) -> None:
        config = self.make_config(model, "+engine.options.mem-fraction-static=0.6")
        separate = {"solver": [["8"]], "verifier": [["9"]]}
        assert share_gpu_memory(config, separate) is config

    def test_servers_are_started_with_their_shares(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weight_bytes = engine_weight_bytes(read_architecture(model), 1)
        properties = SimpleNamespace(total_memory=10 * weight_bytes)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
        engines: list[dict[str, Any]] = []

        def recording_make_engines(*args: Any, **kwargs: Any) -> dict[str, Any]:
            engines.append(make_engines(*args, **kwargs))
            return engines[-1]

        monkeypatch.setattr(running, "make_engines", recording_make_engines)
        config = self.make_config(model, f"engine.python={sys.executable}")
        with running_team(config, f"{tmp_path}/", -2):
            for engine in engines[0].values():
                [replica] = engine.fleet.replicas
                assert replica.shared_gpus == ["8"]
                assert replica.host.memory_share == 0.4
                assert replica.gpus == ["8"]


def test_a_team_on_cpus_sees_no_gpu(tmp_path: Path) -> None:
    config = RunConfig.load(make_run(tmp_path, "data.test=1") / "config.yaml")
    with running_team(config, f"{tmp_path}/", -2):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["CUDA_VISIBLE_DEVICES"].startswith("8,9")


def test_replicas_of_the_embedded_engine_on_the_cpu_are_one_engine(tmp_path: Path) -> None:
    run = make_run(tmp_path, "data.test=1", "engine.replicas=2")
    with running_team(RunConfig.load(run / "config.yaml"), f"{tmp_path}/", -2) as team:
        assert team.servers == 2  # one for each of the two policies


def test_remote_models_are_closed_if_an_engine_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(requests: object) -> dict[str, Any]:
        raise EngineError("no engine")

    monkeypatch.setattr(running, "make_engines", fail)
    run = make_run(tmp_path, "data.test=1")
    remote = {"remote": {"model": "big", "url": "http://127.0.0.1:1"}}
    config = config_with_seats(
        RunConfig.load(run / "config.yaml"), "x", {"solver": "base", "verifier": remote}
    )
    errors = []
    for _ in range(2):
        with (
            pytest.raises(EngineError, match="no engine") as raised,
            running_team(config, f"{tmp_path}/", -2),
        ):
            pass
        errors.append(raised.value)  # its traceback keeps the clients alive


def test_a_server_sees_its_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def record_gpus(server: Server, gpus: Any) -> str:
        started.append(gpus)
        return "http://127.0.0.1:1"

    monkeypatch.setattr(Server, "start", record_gpus)
    config = make_config("engine.tp=2", "engine.python=" + sys.executable)
    model = make_run(tmp_path, "data.test=2") / "base"
    requests = engine_requests(
        config,
        dict.fromkeys(config.models, model),
        tmp_path,
        trained=False,
        gpus=assign_engine_gpus(config),
    )
    engines = make_engines(requests)
    for engine in engines.values():
        for replica in engine.fleet.replicas:
            assert isinstance(replica, Replica)
            asyncio.run(replica.start())
    assert started == [["8", "9"], ["10", "11"], ["12", "13"], ["14", "15"]]
    assert visible_gpu_ids()[0] == "8"
