"""Placement of the processes of a run on nodes."""

from typing import Any

import pytest

from mcore_mas.planning.worker_groups import PlacementError, WorkerGroup
from mcore_mas.runtime import placement
from mcore_mas.runtime.devices import RunDevices
from mcore_mas.runtime.placement import DevicePlacement, packing_strategies
from mcore_mas.runtime.rank_pool import meeting_address


def test_a_group_is_on_one_node_if_it_fits_there() -> None:
    assert packing_strategies([4, 2, 2], [8]) == ["STRICT_PACK"] * 3
    # The groups of 6 leave 2 devices free on each node.
    assert packing_strategies([6, 6, 4], [8, 8]) == ["STRICT_PACK", "STRICT_PACK", "PACK"]
    # The group of 4 gets the smallest node that it fits on, so that the group of 8 fits on the other.
    assert packing_strategies([4, 8], [8, 4]) == ["STRICT_PACK", "STRICT_PACK"]
    assert packing_strategies([16], [8, 8]) == ["PACK"]


def test_a_group_is_only_placed_on_its_allowed_nodes() -> None:
    assert packing_strategies([2, 2], [8, 2], [[1], [0, 1]]) == ["STRICT_PACK", "STRICT_PACK"]
    assert packing_strategies([4, 2], [8, 2], [[1], [1]]) == ["PACK", "STRICT_PACK"]


def fake_placement(monkeypatch: pytest.MonkeyPatch, nodes: str) -> list[Any]:
    """Replace Ray's placement groups, and return the list to which their label selectors are added.

    Bundle n is on the node with the n-th letter of `nodes`.
    """
    selectors: list[Any] = []

    def reserve(_: object, bundles: list[int], strategy: str, labels: list[Any]) -> str:
        selectors.append(labels)
        return "group"

    monkeypatch.setattr(DevicePlacement, "_reserve", reserve)
    monkeypatch.setattr(
        placement, "placement_group_table", lambda _: {"bundles_to_node_id": dict(enumerate(nodes))}
    )
    return selectors


@pytest.mark.parametrize(
    ("nodes", "fits"), [("bbaa", True), ("baba", True), ("aaab", False), ("aaaa", True)]
)
def test_tensor_parallel_ranks_are_placed_on_one_node(
    nodes: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_placement(monkeypatch, nodes)
    solver = WorkerGroup(policy="solver", part="trainer", devices=4, tp=2)
    devices = RunDevices(
        device_type="GPU", pool="shared", worker_groups=[solver], nodes={"a": 4, "b": 4}
    )
    device_placement = DevicePlacement(devices)
    if not fits:
        expected = r"solver: trainer needs every 2 GPUs on one node \(tp\), and the nodes'"
        with pytest.raises(PlacementError, match=expected):
            device_placement.fill()
        return
    device_placement.fill()
    assert device_placement.nodes["solver", "trainer"] == sorted(nodes)
    bundles = [
        options["scheduling_strategy"].placement_group_bundle_index
        for options in device_placement.options["solver", "trainer"]
    ]
    assert [nodes[bundle] for bundle in bundles] == sorted(nodes)


def test_trainers_and_engines_have_the_same_order_of_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's ids of nodes are random. In their order, servers on "a" would be paired with trainers on "b"."""
    fake_placement(monkeypatch, "abab")
    groups = [WorkerGroup(policy="solver", part=part, devices=4) for part in ("trainer", "engine")]
    devices = RunDevices(
        device_type="GPU", pool="shared", worker_groups=groups, nodes={"b": 2, "a": 2}
    )
    device_placement = DevicePlacement(devices)
    device_placement.fill()
    assert device_placement.nodes == {
        ("solver", "trainer"): [*"bbaa"],
        ("solver", "engine"): [*"bbaa"],
    }


def test_the_embedded_engine_is_on_the_node_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    selectors = fake_placement(monkeypatch, "ab")
    groups = [
        WorkerGroup(policy="solver", part="trainer", devices=2),
        WorkerGroup(policy="solver", part="engine", devices=1, on_driver_node=True),
    ]
    devices = RunDevices(
        device_type="CPU",
        pool="shared",
        worker_groups=groups,
        nodes={"a": 1, "b": 1},
        driver_node="b",
    )
    device_placement = DevicePlacement(devices)
    device_placement.fill()
    assert selectors == [[{"ray.io/node-id": "b"}, {}]]
    assert device_placement.nodes["solver", "engine"] == ["b"]
    assert sorted(device_placement.nodes["solver", "trainer"]) == ["a", "b"]


def test_ranks_of_one_node_meet_on_the_loopback_address() -> None:
    assert meeting_address(["10.0.0.7", "10.0.0.7"]) == "127.0.0.1"
    assert meeting_address(["10.0.0.7", "10.0.0.8", "10.0.0.7"]) == "10.0.0.7"
