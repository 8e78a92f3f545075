"""Engine factory: an engine for each policy of a run, and the environments with the retriever that they ask."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mcore_mas.config.policy import policies_on_base
from mcore_mas.config.run import RunConfig, for_policy
from mcore_mas.planning.machine import visible_gpu_ids
from retrieval.client import RetrievalClient
from retrieval.sidecar import RetrieverSidecar
from rollout.base.errors import ModelError
from rollout.base.json_files import read_record
from rollout.base.processes import Restarts, allow_open_files
from rollout.config.agents import build_player
from rollout.config.environment import build_env
from rollout.config.retriever import RetrieverConfig
from rollout.engines import EngineConfig, PolicyClient
from rollout.engines.adapters import adapter_engines
from rollout.engines.registry import TRANSPORTS, engine_class
from rollout.engines.remote import hide
from rollout.engines.remote.caller import RemoteClient
from rollout.environments.protocol import Env
from rollout.models.chat_template import Renderer
from rollout.models.fused_weights import AdapterShape
from rollout.records.trajectory import Task

RETRIEVER_RESTARTS = 3  # per hour, of a server beside a run that died or hangs
_ON_EACH_GPU = "rollout.engines.embedded.batching:LocalReplicas"


def open_remotes(config: RunConfig, folder: Path) -> dict[str, RemoteClient]:
    """The remote models, by policy, with their replies kept below `folder`; before any child process starts.

    Raises:
        RemoteError: no key, or a folder in use.
    """
    return {name: RemoteClient(remote, folder / name) for name, remote in config.remotes.items()}


def make_engines(
    config: RunConfig,
    models: Mapping[str, str | Path],
    log: Path,
    *,
    trained: bool,
    places: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    gpus: Mapping[str, Sequence[Sequence[str]]] | None = None,
    nodes: int | None = None,
) -> dict[str, Any]:
    """An engine for each policy's model folder; servers log below `log`.

    With `trained` the engines take weights from trainers, and Ray must be running; `places` are then actor options of
    each engine's devices, and `nodes` is the number of nodes of a Ray that was joined.
    Without it `gpus` are those of each engine's servers, or copies, by policy; what a training wrote has its last
    step's version.
    """
    engines: dict[str, Any] = {}
    held = Counter(gpu for servers in (gpus or {}).values() for own in servers for gpu in own)
    for policy, model in models.items():
        if policy in engines:  # that of another policy on the same model
            continue
        engine = for_policy(config, policy).engine
        settings = _engine_settings(config, engine, trained, config.policies[policy].bf16)
        if not trained and engine.name in TRANSPORTS:  # an engine of one's own need not take it
            settings["version"] = _step_of(model)
        if engine.name == "sglang":
            settings |= {"log": log / f"{policy}.log", "start_s": engine.start_deadline_s(model)}
        if engine.weights_folder and "threads" in settings:
            settings["weights_folder"] = engine.weights_folder / config.run / policy
        if nodes is not None and "threads" in settings:
            settings["weights_folder"] = settings.get("weights_folder", log / policy).resolve()
            if engine.name == "sglang":
                settings["far"] = nodes > 1
        name = engine.name if trained or engine.name != "embedded" else "embedded_local"
        if gpus is not None and engine.name == "sglang":
            in_turn = any(held[gpu] > 1 for own in gpus[policy] for gpu in own)
            settings |= {"replicas": len(gpus[policy]), "gpus": gpus[policy], "in_turn": in_turn}
        elif gpus is not None and name == "embedded_local" and any(gpus[policy]):
            name, seen = _ON_EACH_GPU, visible_gpu_ids()
            settings |= {"devices": [f"cuda:{seen.index(gpu)}" for (gpu,) in gpus[policy]]}
            del settings["device"]
        own = places.get(policy) if places else None
        if name == "embedded" and engine.replicas > 1:
            name = "embedded_replicas"
            settings = {"weights_folder": (log / policy).resolve()} | settings
            settings |= {"places": own or [{}] * engine.replicas}
        elif own:
            in_turn = config.cluster.pool == "shared"
            settings |= (
                {"places": own, "in_turn": in_turn} if name == "sglang" else {"place": own[0]}
            )
        slots = trained and engine.adapters == "slots" and policy in config.trained
        if slots or (name == "embedded" and config.policies[policy].share_base):
            together = policies_on_base(config.policies, policy)
            loras = [lora for other in together if (lora := config.policies[other].lora)]
            shapes = [AdapterShape(rank=x.rank, scale=x.scale, targets=x.targets) for x in loras]
            engines |= zip(together, adapter_engines(name, model, shapes, **settings), strict=True)
            continue
        engines[policy] = engine_class(name)(model, **settings)
    return engines


def _step_of(model: str | Path) -> int:
    """The steps that the weights in a folder were trained for; 0 where no training wrote it."""
    done = Path(model).parent.parent / "done.json"
    told = read_record(done) if done.is_file() else {}
    return (
        int(told.get("policies_of_step", 0))
        if str(model) in told.get("policies", {}).values()
        else 0
    )


def _engine_settings(
    config: RunConfig, engine: EngineConfig, trained: bool, bf16: bool = False
) -> dict[str, Any]:
    """What an engine of this section is made with for a policy in bfloat16 or not, besides its model and its place."""
    settings: dict[str, Any] = {"rows": engine.slots, "max_length": engine.max_length}
    if engine.name == "sglang":
        plain = ("urls", "members", "replicas", "tp", "environment", "verify")
        settings |= {name: getattr(engine, name) for name in plain}
        settings |= {
            "timeout_s": engine.request_deadline_s,
            "python": str(engine.python) if engine.python else None,
            "key": engine.key_file.read_text().strip() if engine.key_file else None,
            "options": {"enable-deterministic-inference": engine.deterministic} | engine.options,
        }
        if (
            trained and engine.sleep and engine.options.get("device") != "cpu"
        ):  # else it gives no memory back
            settings["options"] = {"enable-memory-saver": True} | settings["options"]
    if engine.name == "sglang" or (engine.name == "embedded" and trained):
        settings |= {
            "threads": config.cluster.threads_per_process or 1,
            "restarts": engine.restarts,
        }
        settings |= {"transport": engine.transport} if engine.transport else {}
    if trained and engine.router_replay:
        settings["routing"] = True
    if engine.name == "embedded":
        settings |= {"device": engine.device, "deterministic": engine.deterministic, "bf16": bf16}
    return settings


def make_renderers(config: RunConfig, models: Mapping[str, str | Path]) -> dict[str, Renderer]:
    """What writes the chats of each policy, by the tokenizer of its folder in `models`.

    Raises:
        ModelError: a folder has no template, or one that reads no such argument.
    """
    renderers = {}
    for name, model in models.items():
        own = config.policies[name]
        try:
            renderers[name] = Renderer(
                model, template=own.chat_template, arguments=own.chat_template_kwargs
            )
        except ModelError as error:
            raise ModelError(f"policies.{name}: {error}") from None
    return renderers


def make_players(
    config: RunConfig,
    engines: Mapping[str, Any],
    servers: Mapping[str, Sequence[object]] | None = None,
) -> dict[str, PolicyClient]:
    """The clients of the policies that have an engine; `servers` are the engine's by policy, if not the config's."""
    renderers = make_renderers(config, {name: config.models[name] for name in engines})
    sections = {name: for_policy(config, name).engine for name in engines}
    count = {name: len(servers[name]) if servers else sections[name].servers for name in engines}
    # as many calls as an engine has slots, so that nothing waits there, where its deadline would go on; adapters that
    # one actor holds have its slots in common
    hosts = {name: getattr(engine, "host", engine) for name, engine in engines.items()}
    slots = {
        id(host): asyncio.Semaphore(sections[name].slots * count[name])
        for name, host in hosts.items()
    }
    return {
        name: build_player(
            engine,
            renderers[name],
            deadline_s=config.collection.call_s,
            max_length=sections[name].max_length,
            overlong_prompts=sections[name].overlong_prompts,
            max_in_flight=config.policies[name].max_in_flight or slots[id(hosts[name])],
        )
        for name, engine in engines.items()
    }


def close_engines(engines: Mapping[str, Any]) -> None:
    """End the processes of engines that have some."""
    for engine in engines.values():
        if hasattr(engine, "close"):
            engine.close()


@contextmanager
def world(config: RunConfig, log: str) -> Iterator[Callable[[Task], Env]]:
    """A maker of the run's environments; a retriever of its own logs to `log`.log in the run folder.

    The run's keys leave the environment first, also where only training would use them.

    Raises:
        RetrievalError: the retriever does not start.
    """
    allow_open_files()
    for model in (*config.remotes.values(), *([config.coach] if config.coach else ())):
        hide(model.key_variable)
    if config.retriever is None:
        yield build_env(config.env)
        return
    retriever = config.retriever
    with ExitStack() as stack:
        urls = retriever.urls
        revive = None
        if not retriever.elsewhere:
            index_dir = retriever.folder or config.folder / "index"
            sidecar = sidecar_of(retriever, index_dir, config.folder / f"{log}.log")
            urls = (stack.enter_context(sidecar),)
            revive = sidecar.revive
        client = RetrievalClient(
            *urls,
            timeout_s=retriever.timeout_s,
            patience_s=retriever.patience_s,
            token_file=retriever.key_file,
            revive=revive,
        )
        yield build_env(config.env, retriever=client)


def sidecar_of(
    retriever: RetrieverConfig, index_dir: Path, log: Path | None = None
) -> RetrieverSidecar:
    """Return the retrieval server beside a run; it uses the last GPU of the machine, or none."""
    return RetrieverSidecar(
        index_dir,
        log_path=log,
        python=retriever.python,
        encoder_folder=retriever.encoder_folder,
        gpus=visible_gpu_ids()[-retriever.gpus :] if retriever.gpus else (),
        extra_args=(
            "--threads",
            str(retriever.threads),
            "--ranking",
            retriever.ranking,
            "--device",
            retriever.device,
            "--deadline-s",
            str(retriever.timeout_s),
        ),
        may_restart=Restarts("retriever", RETRIEVER_RESTARTS).take,
    )
