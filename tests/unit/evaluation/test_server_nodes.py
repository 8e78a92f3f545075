"""An evaluation has SGLang servers on all nodes of a Ray cluster."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation import running_team as running
from mcore_mas.evaluation import server_nodes
from mcore_mas.evaluation.running_team import running_team
from mcore_mas.evaluation.server_nodes import servers_of_each
from mcore_mas.planning.worker_groups import (
    GroupKey,
    PlacementError,
    evaluates_on_all_nodes,
)
from mcore_mas.runtime.cluster import Node
from mcore_mas.runtime.devices import RunDevices
from rollout.engines.build import EngineRequest
from rollout.engines.sglang.build import sglang_settings
from tests.support.run_folder import make_run


def make_config(*overrides: str) -> RunConfig:
    servers = ["engine=sglang", "cluster.device=auto"]
    return RunConfig.from_values(resolve(["experiment=demo_math", *servers, *overrides]), "a test")


@pytest.mark.parametrize(
    ("sizes", "nodes", "servers"),
    [
        ([8, 8], [8] * 8, 4),
        ([1, 1], [4, 4], 4),
        ([4, 8], [8, 8], 1),
        ([3], [4, 4], 2),  # one on each node
        ([3, 3], [4, 4], 1),
        ([8], [4, 4], 0),  # a server is on one node
    ],
)
def test_as_many_servers_of_each_policy_as_fit(
    sizes: list[int], nodes: list[int], servers: int
) -> None:
    assert servers_of_each(sizes, nodes) == servers


def test_only_servers_that_a_run_starts_can_be_on_any_node() -> None:
    assert evaluates_on_all_nodes(make_config())
    embedded = "policies.verifier.overrides.engine={name: embedded}"
    assert not evaluates_on_all_nodes(make_config(embedded))
    elsewhere = ["engine.python=null", "+engine.urls=['http://127.0.0.1:1']"]
    assert not evaluates_on_all_nodes(make_config(*elsewhere))


def test_a_teacher_does_not_keep_an_evaluation_on_one_node() -> None:
    teacher = "+policies.teacher={model: big, overrides: {engine: {name: embedded}}}"
    run = make_config(teacher, "+policies.solver.teacher={policy: teacher}")
    assert evaluates_on_all_nodes(run)


class ReservedDevices:
    """Stand-in for `DevicePlacement`, which reserves the devices of the worker groups in Ray."""

    def __init__(self, devices: RunDevices) -> None:
        self.devices = devices
        self.options: dict[GroupKey, list[dict[str, int]]] = {}

    def fill(self) -> None:
        for group in self.devices.worker_groups:
            self.options[group.policy, group.part] = [{"num_gpus": 1}] * group.devices


def test_the_servers_of_a_team_are_placed_on_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [Node(address=f"10.0.0.{n}", id=f"n{n}", gpus=8, cpus=64) for n in (1, 2)]
    joined: list[str] = []
    requests: list[EngineRequest] = []

    @contextmanager
    def joined_ray(address: str, file: Path) -> Iterator[list[Node]]:
        assert file.is_file()  # every node must see the folder
        joined.append(address)
        yield nodes

    def record_requests(new_requests: list[EngineRequest]) -> dict[str, object]:
        requests.extend(new_requests)
        return {policy: object() for request in new_requests for policy in request.policies}

    monkeypatch.setattr(running, "joined_ray", joined_ray)
    monkeypatch.setattr(running, "make_engines", record_requests)
    monkeypatch.setattr(server_nodes, "DevicePlacement", ReservedDevices)
    model = make_run(tmp_path, "data.test=2") / "base"
    models = [f"policies.{policy}.model={model}" for policy in ("solver", "verifier")]
    config = make_config(f"engine.python={sys.executable}", "engine.tp=2", *models)
    with running_team(config, f"{tmp_path}/", -2, "10.0.0.1:6379") as team:
        assert joined == ["10.0.0.1:6379"]
        assert team.servers == 8  # 16 GPUs: four servers of two GPUs for each policy
        for request in requests:
            assert request.placements == [{"num_gpus": 1}] * 8
            assert request.multi_node
            assert not request.shares_gpus
            assert sglang_settings(request).replicas == 4

    too_large = make_config("engine.tp=16", *models)
    message = r"solver 16, verifier 16\), and the nodes have 8, 8; lower engine.tp"
    with (
        pytest.raises(PlacementError, match=message),
        running_team(too_large, f"{tmp_path}/", -2, "10.0.0.1:6379"),
    ):
        pass
