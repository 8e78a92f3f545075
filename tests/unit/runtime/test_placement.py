"""Where each process of a run is placed."""

from typing import Any

import pytest

from mcore_mas.planning.worker_groups import PlacementError, WorkerGroup
from mcore_mas.runtime import placement
from mcore_mas.runtime.devices import RunDevices
from mcore_mas.runtime.placement import DevicePlacement, packing_strategies
from mcore_mas.runtime.rank_pool import meeting_address


def test_a_group_is_on_one_node_if_a_node_has_room_for_it() -> None:
    assert packing_strategies([4, 2, 2], [8]) == ["STRICT_PACK"] * 3
    # the groups of 6 leave 2 and 2 free
    assert packing_strategies([6, 6, 4], [8, 8]) == ["STRICT_PACK", "STRICT_PACK", "PACK"]
    # 4 goes where it fits best, so that 8 has a node of its own
    assert packing_strategies([4, 8], [8, 4]) == ["STRICT_PACK", "STRICT_PACK"]
    assert packing_strategies([16], [8, 8]) == ["PACK"]


def test_a_group_is_only_on_nodes_that_it_may_be_on() -> None:
    assert packing_strategies([2, 2], [8, 2], [[1], [0, 1]]) == ["STRICT_PACK", "STRICT_PACK"]
    assert packing_strategies([4, 2], [8, 2], [[1], [1]]) == ["PACK", "STRICT_PACK"]


def fake_placement(monkeypatch: pytest.MonkeyPatch, nodes: str) -> list[Any]:
    """Replace Ray's placement groups; bundle n is on the node with the n-th letter. Return the label selectors."""
    selectors: list[Any] = []

    def reserve(_: object, bundles: list[int], strategy: str, wanted: list[Any]) -> str:
        selectors.append(wanted)
        return "group"

    monkeypatch.setattr(DevicePlacement, "_reserve", reserve)
    monkeypatch.setattr(
        placement, "placement_group_table", lambda _: {"bundles_to_node_id": dict(enumerate(nodes))}
    )
    return selectors


@pytest.mark.parametrize(
    ("nodes", "fits"), [("bbaa", True), ("baba", True), ("aaab", False), ("aaaa", True)]
)
def test_ranks_that_share_tensors_are_on_one_node(
    nodes: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_placement(monkeypatch, nodes)
    solver = WorkerGroup(policy="solver", part="trainer", devices=4, tp=2)
    devices = RunDevices(
        device_type="GPU", pool="shared", worker_groups=[solver], nodes={"a": 4, "b": 4}
    )
    placed = DevicePlacement(devices)
    if not fits:
        expected = r"solver: trainer needs every 2 GPUs on one node \(tp\), and the nodes'"
        with pytest.raises(PlacementError, match=expected):
            placed.fill()
        return
    placed.fill()
    assert placed.nodes["solver", "trainer"] == sorted(nodes)
    bundles = [
        options["scheduling_strategy"].placement_group_bundle_index
        for options in placed.options["solver", "trainer"]
    ]
    assert [nodes[bundle] for bundle in bundles] == sorted(nodes)


def test_trainers_and_engines_are_in_the_same_order_of_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's ids are random: in their order the servers on "a" would get the memory of trainers on "b"."""
    fake_placement(monkeypatch, "abab")
    groups = [WorkerGroup(policy="solver", part=part, devices=4) for part in ("trainer", "engine")]
    devices = RunDevices(
        device_type="GPU", pool="shared", worker_groups=groups, nodes={"b": 2, "a": 2}
    )
    placed = DevicePlacement(devices)
    placed.fill()
    assert placed.nodes == {("solver", "trainer"): [*"bbaa"], ("solver", "engine"): [*"bbaa"]}


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
    placed = DevicePlacement(devices)
    placed.fill()
    assert selectors == [[{"ray.io/node-id": "b"}, {}]]
    assert placed.nodes["solver", "engine"] == ["b"]
    assert sorted(placed.nodes["solver", "trainer"]) == ["a", "b"]


def test_ranks_meet_on_the_loopback_unless_they_are_on_several_nodes() -> None:
    assert meeting_address(["10.0.0.7", "10.0.0.7"]) == "127.0.0.1"
    assert meeting_address(["10.0.0.7", "10.0.0.8", "10.0.0.7"]) == "10.0.0.7"
