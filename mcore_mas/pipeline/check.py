"""Check of a suite before it costs anything: what is known to fail later, of all runs at once, a line each."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_mas.config.models import check_layout, cold_start_architecture
from mcore_mas.config.run import RunConfig, for_policy
from mcore_mas.pipeline.sources import known_sources
from mcore_mas.pipeline.suite import Suite
from mcore_mas.planning.machine import count_visible_gpus
from mcore_mas.planning.worker_groups import (
    PlacementError,
    check_fits,
    gpus_per_engine,
    list_worker_groups,
)
from mcore_mas.tracking.writers import missing_libraries
from rollout.base.errors import ModelError
from rollout.base.lookup import UnknownName
from rollout.base.text import nearest_hint
from rollout.config.tasks import check_envs, make_tasks
from rollout.engines.remote import has_key
from rollout.models.architecture import open_tensors, tensor_files
from rollout.models.chat_template import has_chat_template
from rollout.records.files import RecordError
from rollout.tasks.files import dataset_files, not_downloaded
from rollout.tasks.splits import SPLITS


def problems(suite: Suite, *, files: bool = True, node_gpus: int = 8) -> list[str]:
    """What is known to fail, a line each with its runs, on machines of `node_gpus` GPUs.

    `files`: also data and models that are not there yet.
    """
    runs: dict[str, list[str]] = {}
    for run in suite.runs:
        config = suite.checked(run)
        own = (*_files(suite, run), *_tasks(suite, config)) if files else ()
        for line in (
            *_models(suite, config, files),
            *machine_problems(config),
            *_servers(config, node_gpus),
            *own,
        ):
            runs.setdefault(line, []).append(run)
    more = {line: f" and {len(own) - 1} more" if len(own) > 1 else "" for line, own in runs.items()}
    return [f"run '{own[0]}'{more[line]}: {line}" for line, own in runs.items()]


def _models(suite: Suite, config: RunConfig, files: bool) -> Iterator[str]:
    """What is wrong with the models of a run's policies."""
    start = suite.starts.get(config.run)
    made = Path(config.results, start, "bootstrap", "model") if start else None
    for name, model in config.models.items():
        policy = config.policies[name]
        try:
            if made == Path(model):
                if cold_start := suite.checked(start or "").cold_start:
                    check_layout(
                        config,
                        name,
                        cold_start_architecture(cold_start.base, f"cold_start of {start}"),
                    )
            elif Path(model, "config.json").is_file() or (
                files and suite.scale == "paper" and not start
            ):
                yield from model_problems(config, name, model, suite.folder)
        except ModelError as error:
            yield str(error)
        if (
            policy.lora is not None
            and policy.lora.adapter
            and not Path(policy.lora.adapter).is_dir()
        ):
            yield f"policies.{name}.lora.adapter: {policy.lora.adapter}: no such folder; expected one in PEFT's format"


def model_problems(
    config: RunConfig, name: str, model: str, folder: Path | None = None
) -> Iterator[str]:
    """What is wrong with a policy's model, or that it is not there; `folder`: of the suite's file."""
    if not Path(model, "config.json").is_file():
        near = nearest_hint(
            model, [str(file.parent) for file in Path(model).parent.glob("*/config.json")]
        )
        expected = _beside(folder, model) or near.removeprefix("; ") or _from(model)
        yield f"policies.{name}: {model}: no model here (config.json is missing); {expected}"
        return
    try:
        if config.policies[name].chat_template is None and not has_chat_template(model):
            yield (
                f"policies.{name}: {model} is a base model without a chat template; set chat_template to plain "
                "or chatml, or take the instruct model"
            )
        check_layout(config, name, Path(model))
        for file in tensor_files(model):
            open_tensors(file, "np")
        if not any(Path(model).glob("tokenizer.*")):
            yield f"policies.{name}: {model}: no tokenizer.json; expected a Hugging Face folder with its tokenizer"
    except ModelError as error:
        yield str(error)


def _beside(folder: Path | None, path: str) -> str:
    """What to do about a path that is meant from the folder of the suite's file; "" if it is not there either."""
    there = (
        folder is not None
        and Path(folder, path).exists()
        and Path(folder, path) != Path(path).absolute()
    )
    return (
        f"paths are relative to the current folder, and it is in {folder}: cd {folder}"
        if there
        else ""
    )


def _from(path: str) -> str:
    """Where a model or file that is not there can be had."""
    if path in known_sources():
        source = known_sources()[path]
        fetched = "" if source.by_hand else ", and the target `acquire` fetches it"
        return f"it is {source.description}{fetched} (docs/tables.md)"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return (
            f"nor is it in the hub's cache on this machine: `hf download {path}`, or name a folder"
        )
    return "name a Hugging Face folder, or the hub's id of a model that was downloaded"


def _files(suite: Suite, run: str) -> Iterator[str]:
    """The data files of a run that are not there, and that nothing makes."""
    if suite.scale != "paper":
        return
    config = suite.checked(run)
    own = [("data", file) for file in suite.data_files(run)]
    own += [("data.options.folder", folder) for folder in suite.data_folders(run)]
    if retriever := config.retriever:
        named = {
            key: getattr(retriever, key) for key in ("folder", "encoder_folder", "golden", "python")
        }
        named["folder"] = retriever.folder and retriever.folder / "index.json"
        own += [(f"retriever.{key}", str(file)) for key, file in named.items() if file]
    given_folders = [
        (split, file) for split in SPLITS for file in config.data.files(split) if file.path.is_dir()
    ]
    for split, given in given_folders:
        try:
            dataset_files(given.path, given.subset, given.split or split)
        except RecordError as error:
            yield f"data.{split}: {error}"
    for where, file in own:
        if not Path(file).exists():
            what = _from(file) if file in known_sources() else not_downloaded(file)
            yield f"{where}: {file}: not here; {_beside(suite.folder, file) or what}"


_READ_AT_ONCE = 2**24  # bytes of data files; larger ones are read when the tasks are made


def _tasks(suite: Suite, config: RunConfig) -> Iterator[str]:
    """What is wrong with a run's tasks, where making them costs next to nothing."""
    data, train = config.data, config.data.train
    own = (
        ":" in data.generator
        if data.generator
        else suite.scale == "paper" and all(map(Path.is_file, data.paths))
    )
    cheap = own and sum(p.stat().st_size for p in data.paths) < _READ_AT_ONCE
    if suite.tasks[config.run] == config.run and (cheap or (data.generator and not own)):
        try:  # of a generator that is shipped, one
            tasks = make_tasks(
                data if own else data.model_copy(update=dict.fromkeys(SPLITS, 1)), config.seed
            )
            train = len(tasks["train"]) if own else train
            check_envs(task for split in tasks.values() for task in split)
            for task in tasks["train"][:1]:
                config.env.check_task(task)
        except (RecordError, UnknownName, ValueError) as error:
            if own or not isinstance(error, RecordError):  # a file of theirs may be made later
                yield f"data: {error}"
                return
    if isinstance(train, int):
        yield from too_few(config, train)


def too_few(config: RunConfig, train: int) -> Iterator[str]:
    """That a step takes more than these tasks."""
    need = config.trainer.tasks_per_step
    if train < need:
        yield f"data.train: {train} tasks are fewer than trainer.tasks_per_step {need}; add tasks, or lower it"


def _servers(config: RunConfig, node_gpus: int) -> Iterator[str]:
    """That a server of an evaluation does not fit one machine: this one, or of those that it submits to."""
    there = node_gpus if _submits() else count_visible_gpus() or node_gpus
    for policy, size in gpus_per_engine(config).items() if config.cluster.device != "cpu" else ():
        if (wanted := size + (config.retriever.gpus if config.retriever else 0)) > there:
            yield (
                f"an evaluation needs {wanted} GPUs of one machine for a server of {policy} (engine.tp {size}), and "
                f"node_gpus is {there}; lower engine.tp, name servers elsewhere (engine.urls), or raise node_gpus "
                "where machines have more"
            )


def _submits() -> bool:
    """Whether jobs go to other machines from here."""
    return shutil.which("sbatch") is not None


def _devices(config: RunConfig) -> Iterator[str]:
    """That the devices of a run's choice are not those of its engines, or too few for its training here."""
    device, gpus = config.cluster.device, count_visible_gpus()
    if device == "cpu" and (gpus or _submits()):
        for policy in config.models:
            engine = for_policy(config, policy).engine
            if (
                engine.name == "sglang"
                and not engine.urls
                and engine.options.get("device") != "cpu"
            ):
                yield f"policies.{policy}: cluster.device: cpu shows SGLang's servers no GPU; set it to auto or cuda"
    searched = config.retriever.gpus if config.retriever else 0
    if device == "cpu" and searched:
        yield "retriever.device: cuda, and cluster.device: cpu shows it no GPU; set one of them to the other"
    if _submits() or config.cluster.address != "local" or device == "cpu":
        return
    if device == "cuda" and not gpus:
        yield "cluster.device: cuda, and there is no GPU here; set it to auto or cpu"
    elif gpus:
        try:
            check_fits(
                list_worker_groups(config, "GPU"), config.cluster.pool, "GPU", [gpus - searched]
            )
        except PlacementError as error:
            yield str(error)


def machine_problems(config: RunConfig) -> Iterator[str]:
    """What this machine lacks; of one that submits to others nothing is known."""
    submits = _submits()
    yield from _devices(config)
    engines = {"engine": config.engine}
    engines |= {
        f"policies.{n}.own.engine": for_policy(config, n).engine
        for n in config.models
        if config.policies[n].own.engine
    }
    for where, engine in engines.items():
        if engine.device == "cuda" and not submits and not count_visible_gpus():
            yield f"{where}.device: cuda, and there is no GPU here; set it to cpu"
        if (
            engine.name == "sglang"
            and engine.python
            and not submits
            and not engine.python.is_file()
        ):
            yield f"{where}.python: {engine.python}: no such interpreter (docs/engines.md makes one)"
    yield from () if submits else missing_libraries(config)
    with_keys: dict[str, Any] = {**engines, "retriever": config.retriever, "coach": config.coach}
    with_keys |= {f"policies.{name}.remote": remote for name, remote in config.remotes.items()}
    for where, section in with_keys.items():
        key: Path | None = getattr(section, "key_file", None)
        if key is not None and not key.is_file():
            yield f"{where}.key_file: {key}: no such file"
        variable: str | None = getattr(section, "key_variable", None)
        if variable is not None and not has_key(variable):
            yield f"{where}.key_variable: {variable} is not set here; export it with the key, or name a key_file"
    servers: dict[str, Any] = config.env.options["servers"] if config.env.name == "mcp" else {}
    commands = {
        f"env.options.servers.{name}": server["command"] for name, server in servers.items()
    }
    if config.orchestra.name == "program" and (command := config.orchestra.options.get("command")):
        commands["orchestra.options"] = command[0]
    for where, program in commands.items():
        if not submits and shutil.which(program) is None:
            yield f"{where}.command: '{program}' is no program on this machine; install it, or name its path"
