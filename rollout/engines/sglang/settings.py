"""Settings of an SGLang engine, checked once: its model, its servers, and how new weights come."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rollout.base.errors import EngineError
from rollout.base.urls import is_loopback
from rollout.engines.registry import transport_error
from rollout.engines.sglang.arguments import argument_problem, named
from rollout.models.architecture import Experts, read_architecture, read_config

if TYPE_CHECKING:
    from rollout.models.fused_weights import AdapterShape
    from rollout.models.layout import Projection

PUSHED = ("tensor", "distributed")  # written into the servers while they pause


@dataclass(frozen=True, kw_only=True)
class SGLangSettings:
    """The settings of an engine, checked.

    Raises:
        EngineError: no such transport, a model that SGLang does not compute, an argument that has a setting here, or
            servers on another machine without a key or a way for weights.
    """

    folder: Path  # Hugging Face model
    max_length: int  # tokens of prompt and reply
    rows: int = 192  # requests decoded at once by a server
    threads: int = 1  # of a server without a GPU
    python: str | None = None  # interpreter of SGLang's environment, or ...
    urls: Sequence[str] = ()  # ... servers that run already
    key: str | None = None  # of those
    far: bool = (
        False  # servers of our own may be on other nodes: they listen at their node's address
    )
    members: Path | str | None = (
        None  # file with the URLs of servers that join and leave, one a line
    )
    replicas: int = 1  # servers of our own
    tp: int = 1  # GPUs of each server
    transport: str = "disk"
    weights_folder: Path | str | None = (
        None  # that trainer and servers see; None: one in shared memory
    )
    # actor options for each GPU, server by server; None: Ray's choice
    places: Sequence[Mapping[str, Any]] | None = None
    # other servers are on its GPUs (seat i of all engines is one), and they start one after the other
    in_turn: bool = False
    gpus: Sequence[
        Sequence[str]
    ] = ()  # that each server sees where Ray places none; (): all that this process sees
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # further arguments of sglang.launch_server
    environment: Mapping[str, str] = field(default_factory=dict)
    verify: bool = True  # compare the servers' checksums with each other after every update
    routing: bool = False  # completions say which experts of a mixture each token went to
    adapters: Sequence[
        AdapterShape
    ] = ()  # that the servers hold beside the model, which then stays as it is
    restarts: int = 2  # in an hour
    start_s: float = 900.0  # that a server may take to answer for the first time
    timeout_s: float = 600.0  # of one request
    log: Path | str = "sglang.log"  # of the servers; a number is put before its suffix

    def __post_init__(self) -> None:
        if problem := transport_error("sglang", self.transport):
            raise EngineError(problem)
        if problem := argument_problem(self.options):
            raise EngineError(f"engine.options: {problem}")
        _check_model(self.folder, self._model)
        for adapter in self.adapters:
            if problem := slot_problem(adapter.targets):
                raise EngineError(problem)
        for url in self.urls:
            self._check_url(url)
        if self.far and self.transport == "disk" and not self.weights_folder:
            raise EngineError(
                "servers on other nodes take their weights from a folder that all nodes see; name one"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """`options`, named as on the server's command line, and what adapters and routing need."""
        slots: dict[
            str, Any
        ] = {}  # of the present version of each adapter and the one before, beside the bare model
        if self.adapters:
            slots = {
                "enable-lora": True,
                "max-lora-rank": max(adapter.rank for adapter in self.adapters),
                "lora-target-modules": sorted(
                    {f"{x}_proj" for adapter in self.adapters for x in adapter.targets}
                ),
                "max-loras-per-batch": 2 * len(self.adapters) + 1,
                "lora-strict-loading": True,
            }
        given = named(self.options)
        if self.routing:
            slots["enable-return-routed-experts"] = True
            if not given.keys() & {"quantization", "moe-a2a-backend"}:
                # what SGLang takes on other GPUs too: on Blackwell its own choice routes within a kernel, and the
                # experts that it then says are all 0 (`bind_runner_backend` of layers/moe/topk.py)
                slots["moe-runner-backend"] = "triton"
        return slots | given

    @property
    def variables(self) -> dict[str, str]:
        """The servers' environment."""
        own = {"OMP_NUM_THREADS": str(self.threads)}
        if self.max_length <= self._model.get("max_position_embeddings", 0):
            # what a server is told beyond `max_length` it never computes, but it would not start so near a model's end
            own["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        return own | dict(self.environment)

    @cached_property
    def own_key(self) -> str:
        """What servers of our own ask of callers, also on loopback: they take weights, as pickles too."""
        return self.key or secrets.token_hex(32)

    @property
    def share(self) -> float | None:
        """Of the memory of GPUs that other servers are on too, what each of its servers takes; None: SGLang chooses."""
        given = self.arguments.get("mem-fraction-static")
        return float(given) if self.in_turn and given is not None else None

    @property
    def vocab(self) -> int:
        """Token ids below this are the model's."""
        return int(self._model["vocab_size"])

    @cached_property
    def experts(self) -> Experts | None:
        """Of the model, where completions say which of them each token went to."""
        return read_architecture(self.folder).experts if self.routing else None

    @property
    def seeded(self) -> bool:
        """Whether SGLang draws with a request's seed."""
        return bool(self.arguments.get("enable-deterministic-inference"))

    def named(self) -> list[str]:
        """The servers that `members` names now; [] without such a file.

        Raises:
            EngineError: one is on another machine without a key or a way for weights.
        """
        file = Path(self.members or "")
        lines = file.read_text().splitlines() if file.is_file() else []
        urls = [
            line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")
        ]
        for url in urls:
            self._check_url(url)
        return list(dict.fromkeys(urls))

    @cached_property
    def _model(self) -> Mapping[str, Any]:
        read = read_config(self.folder)
        if "vocab_size" not in read:
            raise EngineError(
                f"{self.folder}/config.json: no key 'vocab_size'; expected a Hugging Face folder"
            )
        return read

    def _check_url(self, url: str) -> None:
        if is_loopback(urlsplit(url).hostname or ""):
            return
        if not self.key:
            raise EngineError(
                f"engine: {url} is not on this machine; give the servers' key in engine.key_file"
            )
        if self.transport in PUSHED or not self.weights_folder:
            raise EngineError(
                f"engine: {url} is not on this machine; its weights go through a folder that both machines see: "
                "set engine.weights_folder, and engine.transport to disk"
            )


def slot_problem(targets: Sequence[Projection]) -> str:
    """Why SGLang 0.5.23 would leave out a part of an adapter, or not read it; "" if it computes all of it.

    It stacks q, k and v by the names of q's tensors, and gate and up by gate's (`normalize_qkv_proj` of lora/lora.py).
    """
    some = {*targets}
    if (some & {"q", "k", "v"} and not some >= {"q", "v"}) or ("up" in some and "gate" not in some):
        return (
            f"engine.adapters: slots with lora.targets {', '.join(targets)}: SGLang takes an adapter of q, k or v only "
            "with q and v both, and one of up only with gate; add them, or set engine.adapters: merged"
        )
    return ""


# the wheel of NCCL that torch brings, as an environment's metadata say
_NCCL = (
    "from importlib.metadata import distributions as found; "
    "print(*(d.version for name in ('nvidia-nccl-cu13', 'nvidia-nccl-cu12') for d in found(name=name)))"
)


def nccl_mismatch(python: Path) -> str | None:
    """Why processes of this environment and of that of `python` cannot be in one NCCL group; None if nothing is known.

    NCCL refuses a group of two versions, minutes later and on every rank.
    """
    here, there = _nccl_of(sys.executable), _nccl_of(str(python))
    if here == there or not (here and there):
        return None
    return (
        f"NCCL takes no two versions into one group, and it is {here} here and {there} in {python}; "
        f"install nvidia-nccl {there} here (environment.post-deploy.sh)"
    )


def _nccl_of(python: str) -> str:
    """The version of NCCL in an interpreter's environment, "" where no wheel brought it."""
    command = [python, "-I", "-c", _NCCL]
    said = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    ).stdout.split()
    return said[0] if said else ""


def _check_model(folder: Path, config: Mapping[str, Any]) -> None:
    """SGLang 0.5.23 makes every layer of a Qwen-MoE a mixture (`stage_facts` of models/qwen3_moe.py).

    What the checkpoint has for a dense layer it leaves out, without a word, and computes with unset memory instead.
    """
    if not str(config.get("model_type", "")).endswith("_moe"):
        return
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if dense or step != 1:
        raise EngineError(
            f"{folder}: mlp_only_layers {dense} and decoder_sparse_step {step} make some layers dense, and SGLang "
            f"takes every layer of a {config['model_type']} for a mixture; expected [] and 1"
        )
