"""Settings of an SGLang engine: its model, its servers, and the transport of new weights."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from retrieval.regular_files import read_regular_text
from rollout.base.errors import EngineError
from rollout.base.json_files import read_json
from rollout.base.urls import is_loopback
from rollout.engines.registry import transport_error
from rollout.engines.sglang.arguments import argument_error, with_dashes
from rollout.models.architecture import Experts, read_architecture, read_config
from rollout.models.model_config import ServedConfig, read_values

if TYPE_CHECKING:
    from rollout.models.adapter_weights import AdapterShape
    from rollout.models.layout import Projection

PUSH_TRANSPORTS = ("tensor", "distributed")  # they write into the servers, which pause meanwhile


@dataclass(frozen=True, kw_only=True)
class SGLangSettings:
    """Settings of an SGLang engine, which are validated.

    Attributes:
        folder: Hugging Face folder of the model.
        max_length: maximum number of tokens of prompt and reply.
        rows: maximum number of requests that a server decodes at once.
        version: version of the weights in `folder`.
        threads: CPU threads of a server without a GPU.
        python: interpreter of SGLang's environment, which starts the servers; None with `urls`.
        urls: servers that run already, in place of `python`.
        key: API key of the servers; None: servers at `urls` need none, and those that are started
            here get a random one.
        multi_node: True if servers may be on other nodes; they then listen at their node's address.
        members: file with the URLs of servers that join and leave, one a line.
        replicas: number of servers to start; not used with `urls`.
        tp: GPUs of each server.
        transport: transport of new weights; see `TRANSPORTS`.
        weights_folder: folder through which the trainer sends weights with the transport "disk", and
            adapters; None: a new folder in `/dev/shm`.
        placements: Ray actor options of each GPU, server by server; None: Ray chooses.
        gpus: GPUs of each server if Ray does not run; empty: all that this process sees.
        shares_gpus: True if other servers are on the same GPUs. They then start one after another.
        options: further arguments of sglang.launch_server.
        environment: environment variables of the servers.
        compare_servers: True to compare the servers' checksums with each other after every update.
        routing: True if completions name the experts of each token.
        grammar: True if requests may have a grammar.
        adapters: shapes of the adapters that the servers hold in addition to the model, which is
            then frozen.
        restarts: maximum number of restarts within an hour, of all servers together.
        start_s: seconds that a server may take to answer for the first time.
        timeout_s: seconds that a request may take.
        log: log file of the servers; the number of the server is put before the suffix.

    Raises:
        EngineError: there is no such transport or argument, SGLang does not support the model or an
            adapter or would not start with grammars, or servers on another machine have no key or do
            not read their weights from a folder.
    """

    folder: Path
    max_length: int
    rows: int = 192
    version: int = 0
    threads: int = 1
    python: str | None = None
    urls: Sequence[str] = ()
    key: str | None = field(default=None, repr=False)
    multi_node: bool = False
    members: Path | str | None = None
    replicas: int = 1
    tp: int = 1
    transport: str = "disk"
    weights_folder: Path | str | None = None
    placements: Sequence[Mapping[str, Any]] | None = None
    gpus: Sequence[Sequence[str]] = ()
    shares_gpus: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    compare_servers: bool = True
    routing: bool = False
    grammar: bool = False
    adapters: Sequence[AdapterShape] = ()
    restarts: int = 2
    start_s: float = 900.0
    timeout_s: float = 600.0
    log: Path | str = "sglang.log"

    def __post_init__(self) -> None:
        problem = transport_error("sglang", self.transport)
        if problem:
            raise EngineError(problem)
        problem = argument_error(self.options)
        if problem:
            raise EngineError(f"engine.options: {problem}")
        _check_sparse_layers(self.folder, self._model_config)
        if self.grammar:
            _check_end_token(self.folder)
        for adapter in self.adapters:
            problem = adapter_error(adapter.targets)
            if problem:
                raise EngineError(problem)
        for url in self.urls:
            self._check_url(url)
        if self.multi_node and self.transport == "disk" and not self.weights_folder:
            raise EngineError(
                "engine: servers on other nodes read their weights from a folder that all nodes see; "
                "set engine.weights_folder"
            )

    @property
    def pushes_weights(self) -> bool:
        """True if new weights are written into the servers, which keep no other copy of them."""
        return self.transport in PUSH_TRANSPORTS

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that the settings ask for: those for adapters, routing and grammars, and `options`.

        `options` override the others. `server_arguments` adds the arguments that every server gets.
        """
        options = with_dashes(self.options)
        arguments: dict[str, Any] = {}
        if self.adapters:
            projections: set[Projection] = set()
            for adapter in self.adapters:
                projections.update(adapter.targets)
            arguments = {
                "enable-lora": True,
                "max-lora-rank": max(adapter.rank for adapter in self.adapters),
                "lora-target-modules": sorted(f"{target}_proj" for target in projections),
                # The present version of each adapter, the one before, and the bare model.
                "max-loras-per-batch": 2 * len(self.adapters) + 1,
                "lora-strict-loading": True,
            }
        if self.routing:
            arguments["enable-return-routed-experts"] = True
            if not options.keys() & {"quantization", "moe-a2a-backend"}:
                # On Blackwell, SGLang's own choice of a backend routes within a kernel and returns 0 for
                # all experts (`bind_runner_backend` of layers/moe/topk.py). With an all-to-all backend
                # or a quantization SGLang must choose, because Triton may have no kernel for them.
                arguments["moe-runner-backend"] = "triton"
        if self.grammar:
            # The trainer computes the masks with the same library.
            arguments["grammar-backend"] = "llguidance"
            # SGLang refuses grammars if it has no tokenizer.
            arguments["skip-tokenizer-init"] = False
        return arguments | options

    @property
    def server_environment(self) -> dict[str, str]:
        """Environment variables of the servers."""
        variables = {"OMP_NUM_THREADS": str(self.threads)}
        if self.max_length <= self._model_config.max_position_embeddings:
            # A server's context is a few tokens longer than `max_length`. It would refuse a context
            # beyond the model's last position, though it never computes those tokens.
            variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        return variables | dict(self.environment)

    @cached_property
    def server_key(self) -> str:
        """API key of servers that are started here: `key`, or a random one.

        Servers on the loopback require it too. Otherwise any user of the machine could send them
        weights as a pickle, which can run code when it is loaded.
        """
        return self.key or secrets.token_hex(32)

    @property
    def memory_share(self) -> float | None:
        """Share of the total memory of its GPUs that each server takes.

        None if the servers share no GPUs, or if `mem-fraction-static` is not set.
        """
        share = self.arguments.get("mem-fraction-static")
        return float(share) if self.shares_gpus and share is not None else None

    @property
    def vocab(self) -> int:
        """Size of the model's vocabulary."""
        return self._model_config.vocab_size

    @cached_property
    def experts(self) -> Experts | None:
        """Experts of the model; None if completions do not name those of each token."""
        return read_architecture(self.folder).experts if self.routing else None

    @property
    def seeded(self) -> bool:
        """True if SGLang samples by the seed of a request."""
        # With rl-on-policy-target, SGLang turns deterministic inference on by itself.
        names = ("enable-deterministic-inference", "rl-on-policy-target")
        return any(self.arguments.get(name) for name in names)

    def read_members(self) -> list[str]:
        """Return the URLs that the file `members` has now; none without a file.

        Lines that begin with "#" are comments.

        Raises:
            EngineError: a server is on another machine, and there is no key or it does not read its
                weights from a folder.
        """
        if self.members is None or not Path(self.members).is_file():
            return []
        urls = []
        for line in read_regular_text(Path(self.members)).splitlines():
            url = line.strip().rstrip("/")
            if url and not url.startswith("#") and url not in urls:
                self._check_url(url)
                urls.append(url)
        return urls

    @cached_property
    def _model_config(self) -> ServedConfig:
        where = f"{self.folder}/config.json"
        return read_values(ServedConfig, read_config(self.folder), where)

    def _check_url(self, url: str) -> None:
        """Refuse a server on another machine if there is no key, or if it does not read its weights from a folder."""
        if is_loopback(urlsplit(url).hostname or ""):
            return
        if not self.key:
            raise EngineError(
                f"engine: {url} is not on this machine; give the servers' key in engine.key_file"
            )
        if self.pushes_weights or not self.weights_folder:
            raise EngineError(
                f"engine: {url} is not on this machine; its weights go through a folder that both "
                "machines see: set engine.weights_folder, and engine.transport to disk"
            )


def adapter_error(targets: Sequence[Projection]) -> str:
    """Return the reason why SGLang 0.5.23 would not compute all of an adapter, or "".

    SGLang stacks q, k and v by the names of q's tensors, and gate and up by those of gate's
    (`normalize_qkv_proj` of lora/lora.py). A missing k becomes zeros, and a missing v fails.
    """
    projections = set(targets)
    changes_qkv = not projections.isdisjoint({"q", "k", "v"})
    lacks_q_or_v = changes_qkv and not projections.issuperset({"q", "v"})
    lacks_gate = "up" in projections and "gate" not in projections
    if not lacks_q_or_v and not lacks_gate:
        return ""
    return (
        f"engine.adapters: slots with lora.targets {', '.join(targets)}: SGLang takes an adapter "
        "of q, k or v only with q and v both, and one of up only with gate; add them, or set "
        "engine.adapters: merged"
    )


def _check_end_token(folder: Path) -> None:
    """Refuse a model whose files name no token that ends a text.

    SGLang 0.5.23 hands these tokens to llguidance, which does not start without one
    (`_get_hf_eos_token_id` of configs/model_config.py).
    """
    configs = [read_config(folder)]
    generation_config = folder / "generation_config.json"
    if generation_config.is_file():
        configs.append(read_json(generation_config))
    if all(config.get("eos_token_id") is None for config in configs):
        raise EngineError(
            f"{folder}/config.json: with engine.grammar, SGLang needs eos_token_id; add the number "
            "of the token that ends a text"
        )


def _check_sparse_layers(folder: Path, config: ServedConfig) -> None:
    """Refuse a mixture with dense layers.

    SGLang 0.5.23 makes every layer of a Qwen-MoE a mixture (`stage_facts` of models/qwen3_moe.py).
    It silently leaves out what the checkpoint has for a dense layer, and computes with
    uninitialised memory instead.
    """
    if not config.model_type.endswith("_moe"):
        return
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise EngineError(
            f"{folder}: mlp_only_layers {config.mlp_only_layers} and decoder_sparse_step "
            f"{config.decoder_sparse_step} make some layers dense, and SGLang takes every layer of "
            f"a {config.model_type} for a mixture; expected [] and 1"
        )
