# What every stage shares: the suite's checked runs, the values that wildcards may take, and optional inputs.
import atexit
import contextlib
import functools
import re
import sys
import time
from pathlib import Path

from mcore_mas.runtime.pipeline_messages import failure_message, success_message
from mcore_mas.runtime.snakemake_patches import report_silent_failures
from rollout.base.files import ensure_writable
from rollout.base.ownership import FolderError, owned
from rollout.base.processes import end_at_second_interrupt
from mcore_mas.pipeline import sharing
from mcore_mas.pipeline.check import problems
from mcore_mas.pipeline.suite import Suite
from mcore_mas.pipeline.suite_file import SuiteError
from mcore_mas.planning.jobs import job_needs, tasks_mb

try:
    folders = [Path(file).resolve().parent for file in workflow.configfiles[-1:]]
    SUITE = Suite.load(config, *(folders or [None]), cache=Path(".snakemake/configs"))
    acquires = paper_suite.asks_inputs(sys.argv[1:])
    if TABLES and not acquires:
        paper_suite.check_there(SUITE)
    machine = workflow.resource_settings.default_resources or {}
    NODE_GPUS = machine["node_gpus"].raw if "node_gpus" in machine else 8
    if not isinstance(NODE_GPUS, int) or NODE_GPUS < 1:
        raise SuiteError(
            f"default-resources, node_gpus: {NODE_GPUS}; expected the GPUs of a machine, such as 8"
        )
    if (
        workflow.is_main_process and not acquires
    ):  # not in each of its jobs, nor to fetch what they need
        if lines := problems(SUITE, node_gpus=NODE_GPUS):
            raise SuiteError("\n  ".join(lines))
except (SuiteError, OSError) as error:  # one line, no traceback, before any job starts
    raise SystemExit(f"error: {error}") from None
config["experiments"] = (
    SUITE.overrides
)  # grids and the suite's overrides written out, for the report
config.pop("grid", None)
config.pop("overrides", None)
if SUITE.configs:
    config["config_dir"] = str(SUITE.configs)  # the report's suite file is elsewhere

report_silent_failures()
STARTED = time.time()
TASKS = {
    split: f"<results>/{{run}}/tasks/{split}.parquet" for split in ("train", "validation", "test")
}
ENVIRONMENT = "../envs/environment.yml"  # entered only with `--software-deployment-method conda`


wildcard_constraints:
    run="|".join(map(re.escape, SUITE.runs)),
    state="|".join(SUITE.states),
    suite=re.escape(SUITE.name),
    table="|".join(TABLES) or "(?!)",


def settings_of(stage):
    """The resolved config, there before any job, and what `stage` needs of it: an edit there runs its jobs again."""
    return {
        "config": lambda wildcards: str(SUITE.config_path(wildcards.run)),
        "settings": lambda wildcards: sharing.settings_digest(SUITE.runs[wildcards.run], stage),
    }


def needs_of(stage):
    """What jobs of `stage` ask a cluster for, from the plan of their run; with every attempt more memory."""
    needs = functools.cache(lambda run: job_needs(SUITE.checked(run), stage, NODE_GPUS))
    return {
        "mem_mb": lambda wildcards, attempt: needs(wildcards.run).memory_mb * attempt,
        "cpus_per_task": lambda wildcards: needs(wildcards.run).cpus,
        "gres": lambda wildcards: (
            f"gpu:{needs(wildcards.run).gpus}" if needs(wildcards.run).gpus else None
        ),
        "nodes": lambda wildcards: needs(wildcards.run).nodes,
        "tasks": lambda wildcards: needs(wildcards.run).nodes,
        "tasks_per_gpu": 0,  # else the executor takes `tasks` for it
    }


def owner_of(wildcards, *files):
    """Files of the run whose tasks and index this run shares."""
    return [f"<results>/{SUITE.tasks[wildcards.run]}/{file}" for file in files]


def tasks_of_owner(wildcards):
    """That run's tasks."""
    return expand(list(TASKS.values()), run=SUITE.tasks[wildcards.run])


def retriever_of(wildcards):
    """The index and the proof that it answers, for runs with a server beside them."""
    index = SUITE.index(wildcards.run)
    probed = wildcards.run if SUITE.indexes(wildcards.run) else SUITE.tasks[wildcards.run]
    return [index, f"<results>/{probed}/retriever.json"] if index else []


def shards_of(wildcards):
    """The encoded shards of a run that has several jobs encode its passages."""
    shards = SUITE.runs[wildcards.run]["retriever"]["shards"]
    names = [f"{number:04}-of-{shards:04}.f32" for number in range(shards)] if shards > 1 else []
    return [f"<results>/{wildcards.run}/index/shards/{name}" for name in names]


def start_of(wildcards):
    """The cold-started model, this run's or another's, for runs that do not bring a model folder."""
    if wildcards.run not in SUITE.starts:
        return SUITE.models(wildcards.run) if SUITE.scale == "tiny" else []
    return [f"<results>/{SUITE.starts[wildcards.run]}/bootstrap/bootstrap.json"]


def weights_of(wildcards):
    """What must exist before a team can be evaluated: runs whose trained policies play, and the run's own start."""
    trained = SUITE.trained_for(wildcards.run, wildcards.state)
    return [*(f"<results>/{run}/train/done.json" for run in trained), *start_of(wildcards)]


onstart:
    # In place of Snakemake's own lock, which outlives a killed owner and keeps other suites out of the working folder.
    jobs = list(workflow.dag.needrun_jobs())
    with contextlib.ExitStack() as stack:
        try:
            for folder in SUITE.made_folders(path for job in jobs for path in job.output):
                stack.enter_context(owned(ensure_writable(folder)))
        except FolderError as error:
            raise SystemExit(f"error: {error}") from None
        atexit.register(stack.pop_all().close)
    SUITE.write_configs(job.wildcards_dict.get("run") for job in jobs)
    end_at_second_interrupt(
        "error: ended by a second Ctrl-C; the same command goes on from what is saved"
    )


onsuccess:
    print(success_message(config.get("results", "results"), SUITE.name))


onerror:
    # whatever --quiet says, which Snakemake's own log follows
    unfinished = [path for job in workflow.dag.needrun_jobs() for path in job.log]
    print(failure_message(unfinished, STARTED, log), file=sys.stderr)
