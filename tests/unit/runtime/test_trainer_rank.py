"""Environment of a trainer's rank."""

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from mcore_mas.megatron.rank_watch import RankMonitor, RankWatchdog
from mcore_mas.runtime import trainer_rank
from mcore_mas.runtime.trainer_rank import TrainerRank
from rollout.sync.transport import SyncRoute
from tests.support import ranks, reference

CUMEM = "NCCL_CUMEM_ENABLE"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@pytest.mark.parametrize(
    ("cumem", "environment", "value"),
    [("0", {}, "0"), (None, {}, None), ("0", {CUMEM: "1"}, "1")],
)
def test_nccl_is_configured_before_ranks_meet_unless_the_user_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cumem: str | None,
    environment: dict[str, str],
    value: str | None,
) -> None:
    reference.make_model("qwen2", tmp_path / "model")
    spec = replace(ranks.make_spec(str(tmp_path / "model")), cumem=cumem)
    values: list[str | None] = []
    monkeypatch.setattr(
        trainer_rank,
        "init_process_groups",
        lambda *_, **__: values.append(os.environ.get(CUMEM)),
    )
    monkeypatch.setattr(trainer_rank.ray, "nodes", lambda: [{}])
    rank = TrainerRank(1, None)
    monkeypatch.setattr(rank, "_trainer_class", MagicMock())
    monkeypatch.setattr(rank, "_store", MagicMock())
    monkeypatch.setattr(os, "environ", dict(environment))
    rank.join(0, ("127.0.0.1", 1), {"p": spec})
    assert values == [value]


@pytest.mark.parametrize(
    ("deterministic", "environment", "value"),
    [(True, {}, "0"), (True, {NONDETERMINISTIC: "1"}, "1"), (False, {}, None)],
)
def test_a_deterministic_run_has_deterministic_attention(
    monkeypatch: pytest.MonkeyPatch,
    deterministic: bool,
    environment: dict[str, str],
    value: str | None,
) -> None:
    monkeypatch.setattr(os, "environ", dict(environment))
    trainer_rank.set_deterministic_kernels(deterministic=deterministic)
    assert os.environ.get(NONDETERMINISTIC) == value


@pytest.mark.parametrize(
    ("tp", "environment", "value"),
    [(2, {}, "1"), (2, {CONNECTIONS: "8"}, "8"), (1, {}, None)],
)
def test_tensor_parallel_ranks_start_kernels_in_order_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tp: int, environment: dict[str, str], value: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(environment))
    trainer_rank.set_launch_order(tp)
    assert os.environ.get(CONNECTIONS) == value


def test_a_sender_is_closed_when_its_route_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    senders = [MagicMock(), MagicMock()]
    unused_senders = iter(senders)
    monkeypatch.setattr(trainer_rank, "make_sender", lambda *_, **__: next(unused_senders))
    rank = TrainerRank(1, None)
    monkeypatch.setattr(rank, "_trainers", {"p": MagicMock()})
    route = SyncRoute(transport="distributed", target="http://a", model="m")
    after_restart = replace(route, servers=replace(route.servers, starts=1))
    for version, next_route in enumerate([route, route, after_restart]):
        rank.send_weights("p", next_route, version)
    first, second = senders
    assert (first.send.call_count, first.close.call_count) == (2, 1)
    assert (second.send.call_count, second.close.call_count) == (1, 0)


def test_ranks_that_wait_for_each_other_before_weights_are_sent_are_in_a_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make_sender` and `model` communicate with the other ranks, and may hang."""
    monitor = RankMonitor(folder=tmp_path, policy="p", hang_s=60)
    status_file = monitor.status_file(0)
    phases = []

    def record_phase(*_: object, **__: object) -> MagicMock:
        phases.append(status_file.read_text())
        return MagicMock()

    class Trainer:
        model = property(record_phase)

    monkeypatch.setattr(trainer_rank, "make_sender", record_phase)
    rank = TrainerRank(1, monitor)
    monkeypatch.setattr(rank, "_watchdog", RankWatchdog(status_file, monitor.hang_s))
    monkeypatch.setattr(rank, "_trainers", {"p": Trainer()})
    route = SyncRoute(transport="distributed", target="http://a", model="m")
    rank.send_weights("p", route, 1)
    assert phases == ["send_weights\n", "send_weights\n"]
