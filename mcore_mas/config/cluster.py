"""Section of a config about the cluster: nodes, devices and processes of a run."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollout.base.section import Section
from rollout.engines import EngineConfig

# Value of a Ray label.
_Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$")]


def address_problem(address: str) -> str:
    """Describe the problem of a Ray address, or return "" if a run can use it."""
    if address.startswith("ray://"):
        return (
            f"{address}: training through Ray's client was removed; submit the command to the cluster with "
            "`ray job submit`, and set cluster.address: auto (docs/cluster.md)"
        )
    if not re.fullmatch(r"local|auto|[^\s/]+:\d{1,5}", address):
        return f"{address!r}; expected local, auto, or host:port of a running Ray"
    return ""


class NodesConfig(Section):
    """The nodes of a policy's processes, chosen by their Ray label `pool`; None: any node.

    A node gets the label by `ray start --labels pool=NAME`. The label is unrelated to the setting `cluster.pool`.
    """

    # Label of the nodes of the trainer and the critic.
    train: _Label | None = None
    # Label of the nodes of the engine.
    rollout: _Label | None = None


class ClusterConfig(Section):
    """The part of a machine, or of a running Ray cluster, that a run takes."""

    # "local": Ray is started for the run; otherwise a running Ray: host:port of its head, or "auto" (on this machine).
    address: str = "local"
    # Device of trainers and engines. "auto": GPUs if there are any; "cuda": GPUs, and an error if there are none;
    # "cpu": GPUs are hidden from the run, so no engine can have `device: cuda`.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Maximum number of restarts within an hour. If a trainer is lost or hangs, all trainers start again from the newest
    # checkpoint.
    restarts: int = Field(3, ge=0)
    # Seconds without a sign of life after which a trainer at work counts as hanging; None: it never does.
    hang_s: float | None = Field(1800.0, gt=0)
    # CPU threads of a trainer or an engine. None: in a training, the number of cores divided by the number of processes
    # that work at the same time; 1 in all other commands, in a running Ray, and with engine.deterministic.
    threads_per_process: int | None = Field(None, ge=1)
    # Size of Ray's object store in MiB; None: enough for the samples of a step twice, and at least 256.
    object_store_mb: int | None = Field(None, ge=80)
    # "split": each trainer, critic and engine has devices of its own; "shared": all of them use the same devices.
    pool: Literal["split", "shared"] = "split"
    # Nodes of each policy's processes in a running Ray, by policy.
    nodes: dict[str, NodesConfig] = Field(default_factory=dict)
    # Load only one trainer at a time, the one at work; the trainers need policies.NAME.offload.
    one_by_one: bool = False
    # Number of CPU devices of a run without GPUs (see pool); None: as many as needed.
    cpus: int | None = Field(None, ge=1)
    # GPUs such as 8xH100, on which a suite places the run (mcore_mas/planning/place.py).
    gpus: str | None = None

    @model_validator(mode="after")
    def _check_ray_settings(self) -> Self:
        """Check the address; refuse `cpus` for a running Ray, and `nodes` without one or with a shared pool."""
        problem = address_problem(self.address)
        if problem:
            raise ValueError(f"address: {problem}")
        if self.address != "local" and self.cpus is not None:
            raise ValueError(
                "cpus is for a Ray that is started for the run; a running Ray has its own number of CPUs: leave it out"
            )
        if self.nodes and (self.address == "local" or self.pool == "shared"):
            raise ValueError(
                "nodes names nodes of a running Ray: set address to that Ray, and pool: split"
            )
        return self

    def check_engine(self, policy: str, engine: EngineConfig) -> None:
        """Refuse an engine that the placement of a run rules out.

        `cluster.device: cpu` hides the GPUs from every engine. The embedded engine runs on the node where the command
        was started, so `cluster.nodes` cannot choose its nodes.

        For SGLang's servers that the run starts, the transport `tensor` needs trainer and engine on the same GPU, and
        `distributed` needs them on different ones, because NCCL accepts no GPU twice. Several actors of an embedded
        engine need a device each, and read weights from a folder. On a CPU, `engine.deterministic` needs a single
        thread.

        Raises:
            ValueError: the engine does not go with the run's devices, nodes, pool or threads.
        """
        if engine.device == "cuda" and self.device == "cpu":
            raise ValueError(
                f"policies.{policy}: engine.device is cuda, but cluster.device: cpu hides the GPUs from the engine; "
                "set cluster.device: auto, or engine.device: cpu"
            )
        nodes = self.nodes.get(policy)
        if engine.name == "embedded" and nodes is not None and nodes.rollout is not None:
            raise ValueError(
                f"cluster.nodes.{policy}.rollout: the embedded engine runs on the node where the command was "
                "started; leave it out, or use engine: sglang"
            )
        has_own_servers = engine.name == "sglang" and not engine.urls
        if has_own_servers and engine.transport == "tensor" and self.pool == "split":
            raise ValueError(
                f"policies.{policy}: engine.transport: tensor hands over weights in the memory of GPUs that trainer "
                "and engine share, but with cluster.pool: split each has its own GPUs; use cluster.pool: shared, or "
                "transport distributed"
            )
        if has_own_servers and engine.transport == "distributed" and self.pool == "shared":
            raise ValueError(
                f"policies.{policy}: engine.transport: distributed joins trainer and engine in an NCCL group, which "
                "takes no GPU twice, but with cluster.pool: shared they share GPUs; use cluster.pool: split, or "
                "transport tensor"
            )
        has_several_actors = engine.name == "embedded" and engine.replicas > 1
        reads_folder = engine.transport in (None, "disk")
        if has_several_actors and (self.pool == "shared" or not reads_folder):
            raise ValueError(
                f"policies.{policy}: engine.replicas: {engine.replicas} starts several actors of the embedded engine, "
                "each of which needs its own device and reads weights from a folder; use cluster.pool: split and no "
                "engine.transport, or engine.replicas: 1"
            )
        threads = self.threads_per_process or 1
        if threads > 1 and engine.deterministic and self._may_run_on_cpu(engine):
            raise ValueError(
                f"cluster.threads_per_process: {threads}, but on a CPU, engine.deterministic needs 1 thread for equal "
                f"bits, and the engine of policy '{policy}' may run on one; set threads_per_process to 1 or leave it "
                "out, or set engine.device: cuda"
            )

    def _may_run_on_cpu(self, engine: EngineConfig) -> bool:
        """Return True if the engine is an embedded one, and runs on a CPU on some machines."""
        if engine.name != "embedded" or engine.device == "cuda":
            return False
        # With `cluster.device: cuda`, a run without GPUs is refused at its start.
        return engine.device == "cpu" or self.device != "cuda"

    def check_policies(self, groups: Mapping[str, Sequence[str]], resident: Sequence[str]) -> None:
        """Refuse settings of the cluster that do not go with the policies.

        Args:
            groups: for each policy, all policies on its ranks; the holder of their base model comes first.
            resident: trained policies without offload, which keep their memory while the team acts.

        Raises:
            ValueError: `one_by_one` is set, and the pool is split or a trained policy has no offload; or `nodes` names
                an unknown policy, or gives policies on the same ranks different nodes.
        """
        if self.one_by_one and (resident or self.pool == "split"):
            reason = "cluster.pool: split gives each its own GPUs"
            if resident:
                reason = f"policy '{resident[0]}' keeps its memory"
            raise ValueError(
                f"cluster.one_by_one: trainers take turns with the memory of the GPUs that they share, but {reason}; "
                "use cluster.pool: shared and offload: true for every trained policy, or one_by_one: false"
            )
        for name in self.nodes:
            if name not in groups:
                raise ValueError(
                    f"cluster.nodes: no policy is called '{name}'; policies: {', '.join(groups)}"
                )
        for name, group in groups.items():
            if self.nodes.get(name) != self.nodes.get(group[0]):
                raise ValueError(
                    f"cluster.nodes.{name}: share_base puts it on the nodes of '{group[0]}'; give both the same ones"
                )

    def check_shared_engine(
        self, policy: str, engine: EngineConfig, holder: str, holder_engine: EngineConfig
    ) -> None:
        """Check that one engine can take the adapters of `policy` and of the holder of its base model.

        Only the embedded engine and SGLang with `adapters: slots` take several adapters. If both policies have other
        engines, each has an engine of its own, and nothing is checked.

        Raises:
            ValueError: the engine settings of the two policies differ; or the embedded engine has several actors, a
                transport other than `shared`, or trainers in a running Ray, which do not share its memory.
        """
        one_is_embedded = "embedded" in (engine.name, holder_engine.name)
        one_has_slots = "slots" in (engine.adapters, holder_engine.adapters)
        if not one_is_embedded and not one_has_slots:
            return
        if engine != holder_engine:
            raise ValueError(
                f"policies.{policy}.overrides.engine: share_base puts the policy into the engine of '{holder}', whose "
                "settings differ; give both policies the same engine settings, or leave share_base out"
            )
        if engine.name == "sglang":
            return
        in_memory = engine.transport in (None, "shared") and self.address == "local"
        if not in_memory or engine.replicas > 1:
            raise ValueError(
                f"policies.{policy}: share_base keeps adapters in one actor of the embedded engine, and hands them "
                "over in this machine's memory; use engine.replicas: 1, no engine.transport and "
                "cluster.address: local, or leave share_base out"
            )
