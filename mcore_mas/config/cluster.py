"""Section of a config about the cluster: the nodes and devices that a run takes."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from rollout.base.section import Section
from rollout.engines import EngineConfig


def address_problem(address: str) -> str:
    """Return what is wrong with an address of a Ray, or "" if a run can use it."""
    if address.startswith("ray://"):
        return (
            f"{address}: training through Ray's client was removed; submit the command to the cluster with "
            "`ray job submit`, and set cluster.address: auto (docs/cluster.md)"
        )
    if not re.fullmatch(r"local|auto|[^\s/]+:\d{1,5}", address):
        return f"{address!r}; expected local, auto, or host:port of a running Ray"
    return ""


class NodesConfig(Section):
    """The nodes of a cluster that a policy's processes go to, by the value of their label `pool`; None: any."""

    train: str | None = Field(
        None, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$"
    )  # of trainer and critic
    rollout: str | None = Field(
        None, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$"
    )  # of the engine


class ClusterConfig(Section):
    """What of a machine, or of the nodes of a Ray that runs already, a run takes."""

    # "local": a Ray of the run's own; else a running one: host:port of its head, or auto (that of this machine)
    address: str = "local"
    # that trainers and engines compute on; auto: GPUs where there are any. An engine's own `device` is within this
    device: Literal["auto", "cpu", "cuda"] = "auto"
    restarts: int = Field(
        3, ge=0
    )  # of all trainers from the newest checkpoint when one is lost or hangs, in an hour
    hang_s: float | None = Field(
        1800.0, gt=0
    )  # without a sign of life of a trainer at work; None: any time
    threads_per_process: int | None = Field(
        None, ge=1
    )  # None: the cores over the processes that work at a time
    object_store_mb: int | None = Field(None, ge=80)  # None: what a step's samples need
    pool: Literal["split", "shared"] = (
        "split"  # a device for each process, or the same devices for all policies
    )
    nodes: dict[str, NodesConfig] = Field(default_factory=dict)  # by policy; of an `address`
    one_by_one: bool = False  # of trainers with offload, only the one that works has its memory
    cpus: int | None = Field(
        None, ge=1
    )  # devices of a machine without GPUs; None: as many as are needed
    gpus: str | None = (
        None  # such as 8xH100: a suite then places the run on them (mcore_mas/planning/place.py)
    )

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        problem = address_problem(self.address)
        if problem:
            raise ValueError(f"address: {problem}")
        if self.address != "local" and self.cpus is not None:
            raise ValueError(
                "cpus is for a Ray of the run's own; the nodes at an address count theirs: leave it out"
            )
        if self.nodes and (self.address == "local" or self.pool == "shared"):
            raise ValueError(
                "nodes tells apart those of a Ray that runs already: set address, and pool: split"
            )
        return self

    def check_engine(self, policy: str, engine: EngineConfig) -> None:
        """Refuse what the placement rules out for a policy's engine.

        Memory is handed over on one GPU, and NCCL takes none twice; several actors have a device each.

        Raises:
            ValueError: what goes with which pool or device.
        """
        if engine.device == "cuda" and self.device == "cpu":
            raise ValueError(
                f"policies.{policy}: engine.device: cuda, and cluster.device: cpu shows it no GPU; set "
                "cluster.device: auto, or engine.device: cpu"
            )
        served = engine.name == "sglang" and not engine.urls
        if served and engine.transport == "tensor" and self.pool == "split":
            raise ValueError(
                "engine.transport: tensor hands over memory of the engine's own GPUs, and with cluster.pool: split "
                "its trainer is on others; use cluster.pool: shared, or transport distributed"
            )
        if served and engine.transport == "distributed" and self.pool == "shared":
            raise ValueError(
                "engine.transport: distributed joins trainer and engine in an NCCL group, which takes no GPU twice, "
                "and with cluster.pool: shared they are on the same; use cluster.pool: split, or transport tensor"
            )
        several = engine.name == "embedded" and engine.replicas + engine.joining > 1
        if several and (self.pool == "shared" or engine.transport not in (None, "disk")):
            raise ValueError(
                f"policies.{policy}: several actors of its engine have a device each and read weights from a folder; "
                "use cluster.pool: split and no engine.transport, or engine.replicas: 1 and engine.joining: 0"
            )

    def check_policies(self, policies: Mapping[str, Sequence[str]], keeping: Sequence[str]) -> None:
        """Refuse memory in turn, or nodes, that do not go with the policies.

        Args:
            policies: by policy those on the same ranks.
            keeping: trained ones that have their memory while the team acts.

        Raises:
            ValueError: what is in the way, which policies there are, or which share their ranks.
        """
        if self.one_by_one and (keeping or self.pool == "split"):
            what = (
                f"policy '{keeping[0]}' keeps its memory"
                if keeping
                else "cluster.pool: split gives each its own GPUs"
            )
            raise ValueError(
                f"cluster.one_by_one: trainers that share GPUs have memory in turn, and {what}; use cluster.pool: "
                "shared and offload: true of every policy that trains, or one_by_one: false"
            )
        for name in self.nodes:
            if name not in policies:
                raise ValueError(
                    f"cluster.nodes: no policy is called '{name}'; policies: {', '.join(policies)}"
                )
        for name, (first, *_) in policies.items():
            if self.nodes.get(name) != self.nodes.get(first):
                raise ValueError(
                    f"cluster.nodes.{name}: share_base puts it on the nodes of '{first}'; give both the same ones"
                )

    def check_shared_engine(
        self, policy: str, engine: EngineConfig, first: str, own: EngineConfig
    ) -> None:
        """Refuse an engine that policy `first` and another one share, and that cannot hold both.

        Raises:
            ValueError: whose settings differ, or which of them it cannot do.
        """
        if "embedded" not in (engine.name, own.name) and "slots" not in (
            engine.adapters,
            own.adapters,
        ):
            return
        if engine != own:
            raise ValueError(
                f"policies.{policy}.own.engine: share_base puts it in the engine of '{first}', whose settings are "
                "others; give both the same ones, or leave share_base out"
            )
        if engine.name == "sglang":
            return
        there = engine.transport in (None, "shared") and self.address == "local"
        if not there or engine.replicas + engine.joining > 1:
            raise ValueError(
                f"policies.{policy}: share_base keeps adapters in one actor of the embedded engine, and hands them "
                "over in this machine's memory; use engine.replicas: 1, engine.joining: 0, no engine.transport and "
                "cluster.address: local, or leave share_base out"
            )
