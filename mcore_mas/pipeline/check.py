"""Checks of runs before they start, for problems that would make them fail later.

`suite_problems` checks all runs of a suite at once and reports one line per problem. The checks of
one run's models, machine and number of tasks are also used by the Python interface.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mcore_mas.config.models import check_model, cold_start_architecture
from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy
from mcore_mas.pipeline.prompt_check import prompt_problems
from mcore_mas.pipeline.sources import load_sources
from mcore_mas.pipeline.suite import Suite
from mcore_mas.planning.gpus import Cluster
from mcore_mas.planning.machine import count_visible_gpus, smallest_gpu_gb
from mcore_mas.planning.shared_pool import fit_pool
from mcore_mas.planning.worker_groups import (
    PlacementError,
    check_fits,
    gpus_per_engine,
    list_worker_groups,
)
from mcore_mas.tracking.writers import missing_libraries
from rollout.base.errors import ModelError
from rollout.base.hints import nearest_hint
from rollout.base.lookup import UnknownName
from rollout.config.data import DataConfig
from rollout.config.tasks import check_envs, make_tasks
from rollout.engines.config import EngineConfig
from rollout.engines.remote.keys import has_key
from rollout.engines.sglang.toolkit import toolchain_problem
from rollout.models.chat_template import chat_template_problem, has_chat_template
from rollout.models.tensor_files import open_tensors, tensor_files
from rollout.records.files import RecordError
from rollout.records.trajectory import Task
from rollout.tasks.hub_datasets import dataset_files, missing_data_hint
from rollout.tasks.splits import SPLITS

# The check reads the data files of a run if they have less than this in total; larger ones are read
# when the tasks are made.
_MAX_CHECKED_BYTES = 2**24

_COMPARING_ENVS = ("math", "search")  # their reward compares the reply with the task's answers


def suite_problems(suite: Suite, *, check_files: bool = True, node_gpus: int = 8) -> list[str]:
    """Return one line for each problem of a suite, with the first run that has it and the number of others.

    The prompts of runs whose prompt settings are equal are checked once.

    Args:
        suite: the suite.
        check_files: report missing data files and models, and check the tasks.
        node_gpus: number of GPUs of the machines that jobs are submitted to.
    """
    runs_by_problem: dict[str, list[str]] = {}
    made_tasks: dict[str, dict[str, list[Task]]] = {}
    checked_prompt_settings: set[str] = set()
    for run in suite.runs:
        config = suite.run_config(run)
        problems = [
            *_starting_model_problems(suite, config, check_files=check_files),
            *machine_problems(config),
            *_evaluation_server_problems(config, node_gpus),
        ]
        if check_files:
            problems += _file_problems(suite, run)
            problems += _task_problems(suite, config, made_tasks)
            tasks = made_tasks.get(suite.task_owner[run], {})
            train_tasks = tasks.get("train", [])
            prompt_settings = _prompt_settings(config)
            is_checked = prompt_settings in checked_prompt_settings
            if train_tasks and not is_checked and _has_all_models(config):
                checked_prompt_settings.add(prompt_settings)
                try:
                    problems += prompt_problems(config, train_tasks)
                except ModelError as error:
                    problems.append(str(error))
        for problem in problems:
            runs_by_problem.setdefault(problem, []).append(run)

    lines = []
    for problem, runs in runs_by_problem.items():
        others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        lines.append(f"run '{runs[0]}'{others}: {problem}")
    return lines


def _starting_model_problems(
    suite: Suite, config: RunConfig, *, check_files: bool
) -> Iterator[str]:
    """Yield the problems of the models that a run's policies start from."""
    owner = suite.cold_start_owner.get(config.run)
    cold_started_model = Path(config.results, owner, "bootstrap", "model") if owner else None
    must_exist = check_files and suite.scale == "paper" and not owner
    for name, model in config.models.items():
        try:
            if owner and cold_started_model == Path(model):
                cold_start = suite.run_config(owner).cold_start
                if cold_start:
                    architecture = cold_start_architecture(
                        cold_start.base, f"cold_start of {owner}"
                    )
                    check_model(config, name, architecture)
            elif must_exist or Path(model, "config.json").is_file():
                yield from model_problems(config, name, model, suite.folder)
        except ModelError as error:
            yield str(error)

        lora = config.policies[name].lora
        if lora is not None and lora.adapter and not Path(lora.adapter).is_dir():
            yield (
                f"policies.{name}.lora.adapter: {lora.adapter}: no such folder; expected one in "
                "PEFT's format"
            )


def model_problems(
    config: RunConfig, policy: str, model: str, suite_folder: Path | None = None
) -> Iterator[str]:
    """Yield the problems of a policy's model folder: files, chat template and parallel layout.

    Args:
        config: the run's config.
        policy: name of the policy.
        model: the model's folder.
        suite_folder: folder of the suite file, for a hint where the path is relative to it.
    """
    folder = Path(model)
    if not (folder / "config.json").is_file():
        models = [str(file.parent) for file in folder.parent.glob("*/config.json")]
        hint = (
            _suite_folder_hint(suite_folder, model)
            or nearest_hint(model, models).removeprefix("; ")
            or _download_hint(model)
        )
        yield f"policies.{policy}: {model}: no model here (config.json is missing); {hint}"
        return

    try:
        if config.policies[policy].chat_template is None:
            problem = chat_template_problem(model)
            if problem:
                yield f"policies.{policy}: {model}: the chat template cannot be used: {problem}"
            elif not has_chat_template(model):
                yield (
                    f"policies.{policy}: {model} is a base model without a chat template; set "
                    "chat_template to plain or chatml, or take the instruct model"
                )
        check_model(config, policy, folder)
        for file in tensor_files(model):
            open_tensors(file, "np")
        if not any(folder.glob("tokenizer.*")):
            yield (
                f"policies.{policy}: {model}: no tokenizer.json; expected a Hugging Face folder "
                "with its tokenizer"
            )
    except ModelError as error:
        yield str(error)


def _suite_folder_hint(suite_folder: Path | None, path: str) -> str:
    """Return a hint for a missing path that exists relative to the suite file, or ""."""
    if suite_folder is None:
        return ""
    candidate = suite_folder / path
    if not candidate.exists() or candidate == Path(path).absolute():
        return ""
    return (
        "paths are relative to the current folder, and this one exists in the suite's; "
        f"cd {suite_folder}"
    )


def _download_hint(path: str) -> str:
    """Return where a missing model or file comes from, or how to name another one."""
    source = load_sources().get(path)
    if source is not None:
        target = "" if source.by_hand else ", and the target `acquire` fetches it"
        return f"it is {source.description}{target} (docs/tables.md)"
    # A path into a local folder is no id of the hub.
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).parent.is_dir():
        return (
            f"nor is it in the hub's cache on this machine: `hf download {path}`, or name a folder"
        )
    return "name a Hugging Face folder, or the hub's id of a model that was downloaded"


def _file_problems(suite: Suite, run: str) -> Iterator[str]:
    """Yield the data files and the retriever's files of a run that do not exist.

    The scale `tiny` makes its own files, so there are none to check.
    """
    if suite.scale != "paper":
        return
    config = suite.run_config(run)
    for split in SPLITS:
        for file in config.data.files(split):
            if not file.path.is_dir():
                continue
            try:
                dataset_files(file.path, file.subset, file.split or split)
            except RecordError as error:
                yield f"data.{split}: {error}"

    required = [("data", file) for file in suite.data_files(run)]
    required += [("data.options.folder", folder) for folder in suite.data_folders(run)]
    if config.retriever:
        if config.retriever.folder:
            required.append(("retriever.folder", str(config.retriever.folder / "index.json")))
        for key in ("encoder_folder", "golden", "python"):
            path = getattr(config.retriever, key)
            if path:
                required.append((f"retriever.{key}", str(path)))

    for key, path in required:
        if Path(path).exists():
            continue
        hint = _suite_folder_hint(suite.folder, path)
        if not hint:
            hint = _download_hint(path) if path in load_sources() else missing_data_hint(path)
        yield f"{key}: {path} does not exist; {hint}"


def _task_problems(
    suite: Suite, config: RunConfig, made_tasks: dict[str, dict[str, list[Task]]]
) -> Iterator[str]:
    """Yield the problems of a run's tasks, as far as making them is cheap.

    All tasks are made if they come from small data files or from a generator of the user. A shipped
    generator makes one task of each split. Large data files, and those of the scale `tiny`, are not
    read.

    Runs that share tasks are each checked, because each has settings of its own.

    Args:
        made_tasks: tasks by split, by the run that makes them. A run that makes tasks is checked
            before those that share them, and adds its tasks.
    """
    owner = suite.task_owner[config.run]
    try:
        if owner == config.run:
            made_tasks[owner] = _make_cheap_tasks(suite, config)
        tasks = made_tasks.get(owner)
        if tasks is None:  # the problem is reported for the owner
            return
        _check_environment(config, tasks)
    except (RecordError, UnknownName, ValueError) as error:
        yield f"data: {error}"
        return

    all_tasks = [task for split in SPLITS for task in tasks[split]]
    yield from answer_problems(config.env.name, all_tasks)
    if _all_tasks_are_cheap(suite, config.data):
        yield from task_count_problems(config, len(tasks["train"]))
    elif isinstance(config.data.train, int):
        yield from task_count_problems(config, config.data.train)


def _make_cheap_tasks(suite: Suite, config: RunConfig) -> dict[str, list[Task]]:
    """Return the tasks of each split, or as many as are cheap to make (see `_task_problems`)."""
    data = config.data
    if _all_tasks_are_cheap(suite, data):
        return make_tasks(data, config.seed)
    if data.generator and ":" not in data.generator:
        one_per_split = data.model_copy(update=dict.fromkeys(SPLITS, 1))
        return _make_tasks_if_possible(one_per_split, config.seed)
    return {split: [] for split in SPLITS}


def _all_tasks_are_cheap(suite: Suite, data: DataConfig) -> bool:
    """Return True if the check can make all tasks: they are from small files or the user's code."""
    if data.generator:
        if ":" not in data.generator:  # a shipped generator, which is no import path
            return False
    elif suite.scale != "paper" or not all(path.is_file() for path in data.paths):
        return False
    return sum(path.stat().st_size for path in data.paths) < _MAX_CHECKED_BYTES


def _make_tasks_if_possible(data: DataConfig, seed: int) -> dict[str, list[Task]]:
    """Return the tasks of a shipped generator, or none if a file that it reads is yet to be made."""
    try:
        return make_tasks(data, seed)
    except RecordError:
        return {split: [] for split in SPLITS}


def _prompt_settings(config: RunConfig) -> str:
    """Return the settings that the prompts of a team depend on, as a text."""
    templates = {
        policy: (
            config.policies[policy].chat_template,
            for_policy(config, policy).engine.max_length,
        )
        for policy in config.models
    }
    sections = config.model_dump_json(include={"agents", "orchestra", "env", "data"})
    return f"{sections} {config.models} {templates}"


def _has_all_models(config: RunConfig) -> bool:
    """Return True if the models of all local policies are here and have no problems."""
    return not any(
        any(model_problems(config, policy, model)) for policy, model in config.models.items()
    )


def _check_environment(config: RunConfig, tasks: dict[str, list[Task]]) -> None:
    """Check that the environments of all tasks exist, and that the first task can begin.

    Raises:
        UnknownName: an environment does not exist.
        ValueError: the environment cannot be made, or cannot begin the task.
    """
    check_envs(task for split in tasks.values() for task in split)
    if tasks["train"]:
        config.env.check_task(tasks["train"][0])


def answer_problems(env: str, tasks: Sequence[Task]) -> Iterator[str]:
    """Yield a problem if an environment that compares answers gets tasks without one."""
    without_answers = [task for task in tasks if not any(task.answers)]
    if env in _COMPARING_ENVS and without_answers:
        yield (
            f"tasks: {len(without_answers)} of {len(tasks)} have no answer, and env '{env}' compares "
            f"replies with it; the first is {without_answers[0].prompt!r:.80}; give each an answer "
            "(data.columns names its column), or use an env of your own"
        )


def task_count_problems(config: RunConfig, train_tasks: int) -> Iterator[str]:
    """Yield a problem if one training step needs more tasks than there are."""
    tasks_per_step = config.trainer.tasks_per_step
    if train_tasks < tasks_per_step:
        yield (
            f"data.train: {train_tasks} tasks are fewer than trainer.tasks_per_step "
            f"{tasks_per_step}; add tasks, or lower it"
        )


def _evaluation_server_problems(config: RunConfig, node_gpus: int) -> Iterator[str]:
    """Yield a problem for each policy whose evaluation needs more GPUs than one machine has.

    One machine has as many GPUs as this machine, or `node_gpus` if this machine submits jobs to
    others or has no GPU.
    """
    if config.cluster.device == "cpu":
        return
    visible_gpus = 0 if _submits_jobs() else count_visible_gpus()
    if visible_gpus:
        available = visible_gpus
        limit_and_remedies = (
            f"this machine has {visible_gpus}; lower engine.tp, or name servers elsewhere "
            "(engine.urls)"
        )
    else:
        available = node_gpus
        limit_and_remedies = (
            f"node_gpus is {node_gpus}; lower engine.tp, name servers elsewhere (engine.urls), or "
            "raise node_gpus where machines have more"
        )

    retriever_gpus = config.retriever.gpus if config.retriever else 0
    for policy, engine_gpus in gpus_per_engine(config).items():
        needed = engine_gpus + retriever_gpus
        if needed > available:
            yield (
                f"an evaluation needs {needed} GPUs of one machine for a server of {policy} "
                f"(engine.tp {engine_gpus}), and {limit_and_remedies}"
            )


def _submits_jobs() -> bool:
    """Return True if jobs can be submitted to other machines, whose devices are unknown here."""
    return shutil.which("sbatch") is not None


def machine_problems(config: RunConfig) -> Iterator[str]:
    """Yield contradictions between settings, and what this machine lacks, such as GPUs or API keys.

    On a machine that submits jobs, only contradictions and missing API keys are reported, because
    nothing is known about the other machines.
    """
    engines = _engines_by_key(config)
    yield from _device_problems(config)
    yield from _engine_problems(engines)
    if not _submits_jobs():
        yield from missing_libraries(config)
    yield from _api_key_problems(config, engines)
    yield from _program_problems(config)


def _engines_by_key(config: RunConfig) -> dict[str, EngineConfig]:
    """Return the engine of the run, and the engines of policies that have separate settings."""
    engines = {"engine": config.engine}
    for policy in config.models:
        if config.policies[policy].overrides.engine:
            engines[f"policies.{policy}.overrides.engine"] = for_policy(config, policy).engine
    return engines


def _device_problems(config: RunConfig) -> Iterator[str]:
    """Yield the device settings of a run that contradict each other, and the lacks of this machine.

    It may have no GPU, too few GPUs, or GPUs with less memory than planned.
    """
    device = config.cluster.device
    gpus = count_visible_gpus()
    retriever_gpus = config.retriever.gpus if config.retriever else 0
    if device == "cpu":
        if gpus or _submits_jobs():
            yield from _hidden_gpu_problems(config)
        if retriever_gpus:
            yield (
                "retriever.device is cuda, but cluster.device: cpu hides the GPUs from it; set both "
                "to the same device"
            )
        return

    if _submits_jobs() or config.cluster.address != "local":
        return
    if gpus:
        yield from _gpu_memory_problems(config)
        config, _ = fit_pool(config, gpus - retriever_gpus)
        try:
            groups = list_worker_groups(config, "GPU")
            check_fits(groups, config.cluster.pool, "GPU", [gpus - retriever_gpus])
        except PlacementError as error:
            yield str(error)
    elif device == "cuda":
        yield "cluster.device is cuda, but this machine has no GPU; set it to auto or cpu"


def _gpu_memory_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line if a run was planned for GPUs with more memory than those of this machine."""
    if config.cluster.gpus is None:
        return
    planned = Cluster.parse(config.cluster.gpus).gpu.memory
    smallest = smallest_gpu_gb()
    if smallest is not None and smallest < planned:
        yield (
            f"cluster.gpus: {config.cluster.gpus} has {planned:g} GB of memory, and a GPU of this machine "
            f"has {smallest:.1f} GB; name GPUs with as much or less (`mcore-mas plan --gpus` shows what fits)"
        )


def _hidden_gpu_problems(config: RunConfig) -> Iterator[str]:
    """Yield the policies whose SGLang servers need GPUs that a run on CPUs hides from them."""
    for policy in config.models:
        engine = for_policy(config, policy).engine
        starts_servers = engine.name == "sglang" and not engine.urls
        if starts_servers and engine.options.get("device") != "cpu":
            yield (
                f"policies.{policy}: cluster.device: cpu hides the GPUs from SGLang's servers; set "
                "it to auto or cuda"
            )


def _engine_problems(engines: dict[str, EngineConfig]) -> Iterator[str]:
    if _submits_jobs():
        return
    for key, engine in engines.items():
        if engine.device == "cuda" and not count_visible_gpus():
            yield f"{key}.device is cuda, but this machine has no GPU; set it to cpu"
        if engine.name == "sglang" and engine.python and not engine.python.is_file():
            yield (
                f"{key}.python: {engine.python}: no such interpreter; `make setup-sglang` makes it "
                "(docs/engines.md)"
            )
        elif engine.name == "sglang" and engine.python and count_visible_gpus():
            problem = toolchain_problem(engine.python.absolute(), engine.environment)
            if problem:
                yield f"{key}.python: {problem}"


def _api_key_problems(config: RunConfig, engines: dict[str, EngineConfig]) -> Iterator[str]:
    """Yield the files and environment variables of API keys that do not exist."""
    sections: dict[str, Any] = {**engines, "retriever": config.retriever, "coach": config.coach}
    for policy, remote in config.remotes.items():
        sections[f"policies.{policy}.remote"] = remote

    for section_key, section in sections.items():
        file: Path | None = getattr(section, "key_file", None)
        if file is not None and not file.is_file():
            yield f"{section_key}.key_file: {file}: no such file"
        variable: str | None = getattr(section, "key_variable", None)
        if variable is not None and not has_key(variable):
            yield (
                f"{section_key}.key_variable: {variable} is not set here; export it with the key, "
                "or name a key_file"
            )


def _program_problems(config: RunConfig) -> Iterator[str]:
    """Yield the programs of MCP servers and of an agent program that are not installed."""
    if _submits_jobs():
        return
    programs: dict[str, str] = {}
    if config.env.name == "mcp":
        for name, server in config.env.options["servers"].items():
            programs[f"env.options.servers.{name}"] = server["command"]
    if config.orchestra.name == "program":
        command = config.orchestra.options.get("command")
        if command:
            programs["orchestra.options"] = command[0]

    for key, program in programs.items():
        if shutil.which(program) is None:
            yield (
                f"{key}.command: this machine has no program '{program}'; install it, or give its "
                "path"
            )
