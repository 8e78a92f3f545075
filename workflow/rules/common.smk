# Shared by all rules: the checked suite, the values of wildcards, and functions that return inputs,
# parameters and resources.
import atexit
import contextlib
import functools
import re
import sys
import time
from pathlib import Path

from mcore_mas.runtime.pipeline_messages import failure_message, success_message
from mcore_mas.runtime.slurm import largest_node_mb
from mcore_mas.runtime.snakemake_patches import (
    hide_job_errors,
    measure_jobs_less_often,
    quote_interpreter,
    report_silent_failures,
    show_requests,
)
from rollout.base.files import ensure_writable
from rollout.base.ownership import FolderError, owned
from rollout.base.terminal import end_at_second_interrupt
from mcore_mas.pipeline import sharing
from mcore_mas.pipeline.check import suite_problems
from mcore_mas.pipeline.recipe_check import recipe_problems
from mcore_mas.pipeline.suite import Suite
from mcore_mas.pipeline.suite_file import SuiteError
from mcore_mas.planning.jobs import job_needs, retry_memory_mb, tasks_mb

try:
    suite_folder = None
    if workflow.configfiles:
        suite_folder = Path(workflow.configfiles[-1]).resolve().parent
    SUITE = Suite.load(config, suite_folder, cache=Path(".snakemake/configs"))

    acquires_inputs = paper_suite.requests_inputs(sys.argv[1:])
    if TABLES and not acquires_inputs:
        paper_suite.check_inputs_exist(SUITE)

    default_resources = workflow.resource_settings.default_resources or {}

    def default_resource(name, default, expected):
        """Return a default resource of the command line or the profile, a whole number above 0."""
        value = default_resources[name].raw if name in default_resources else default
        if not isinstance(value, int) or value < 1:
            raise SuiteError(f"default-resources, {name}: {value}; expected {expected}")
        return value

    NODE_GPUS = default_resource("node_gpus", 8, "the number of GPUs of a machine, such as 8")
    known_node_mb = None
    if workflow.is_main_process and "node_mem_mb" not in default_resources:
        partition = None
        if "slurm_partition" in default_resources:
            partition = str(default_resources["slurm_partition"].raw)
        known_node_mb = largest_node_mb(partition)
    NODE_MEM_MB = default_resource(
        "node_mem_mb",
        known_node_mb or 1_000_000,
        "the memory in MB of a machine, such as 1000000",
    )

    # Jobs need not repeat the check of the main process, and inputs are acquired before they are
    # checked.
    if workflow.is_main_process and not acquires_inputs:
        # A training that refuses its checkpoints is refused here, before Snakemake removes the record
        # of the finished training.
        problems = [*suite_problems(SUITE, node_gpus=NODE_GPUS), *recipe_problems(SUITE)]
        if problems:
            raise SuiteError("\n  ".join(problems))
except (SuiteError, OSError) as error:
    # No job has started, so the message needs no traceback.
    raise SystemExit(f"error: {error}") from None

# The report is made from `config`: it shows the overrides of each run, with grids expanded.
config["experiments"] = SUITE.overrides
config.pop("grid", None)
config.pop("overrides", None)
if SUITE.configs:
    # The report's suite file lies in another folder, so it needs the absolute path.
    config["config_dir"] = str(SUITE.configs)

quote_interpreter()
hide_job_errors()
show_requests()
report_silent_failures()
measure_jobs_less_often()
STARTED = time.time()
TASKS = {
    split: f"<results>/{{run}}/tasks/{split}.parquet" for split in ("train", "validation", "test")
}
# Jobs enter this environment only with `--software-deployment-method conda`.
ENVIRONMENT = "../envs/environment.yml"


wildcard_constraints:
    run="|".join(map(re.escape, SUITE.runs)),
    state="|".join(SUITE.states),
    suite=re.escape(SUITE.name),
    table="|".join(TABLES) or "(?!)",


def config_params(stage):
    """Return the parameters of a stage: the file of its resolved config, and a digest.

    The digest covers the settings that the stage depends on. If one of them is edited, Snakemake
    runs the stage's jobs again.
    """
    return {
        "config": lambda wildcards: str(SUITE.config_path(wildcards.run)),
        "settings_digest": lambda wildcards: sharing.settings_digest(
            SUITE.runs[wildcards.run], stage
        ),
    }


def cluster_resources(stage):
    """Return the resources of a stage's jobs, from the plan of their run.

    Each further attempt of a job requests more memory, up to what a machine has.
    """
    needs = functools.cache(lambda run: job_needs(SUITE.run_config(run), stage, NODE_GPUS))
    return {
        "mem_mb": lambda wildcards, attempt: retry_memory_mb(
            needs(wildcards.run).memory_mb, attempt, NODE_MEM_MB
        ),
        "cpus_per_task": lambda wildcards: needs(wildcards.run).cpus,
        "gres": lambda wildcards: (
            f"gpu:{needs(wildcards.run).gpus}" if needs(wildcards.run).gpus else None
        ),
        "nodes": lambda wildcards: needs(wildcards.run).nodes,
        "tasks": lambda wildcards: needs(wildcards.run).nodes,
        # Without this key the Slurm executor uses the value of `tasks` for it.
        "tasks_per_gpu": 0,
    }


def files_of_owner(wildcards, *files):
    """Return files of the run whose tasks and index this run shares."""
    return [f"<results>/{SUITE.task_owner[wildcards.run]}/{file}" for file in files]


def tasks_of_owner(wildcards):
    """Return the task files of the run whose tasks this run shares."""
    return expand(list(TASKS.values()), run=SUITE.task_owner[wildcards.run])


def retriever_of(wildcards):
    """Return the index and the probe of a run's retrieval server, or no file without such a server."""
    index = SUITE.index_manifest(wildcards.run)
    if index is None:
        return []
    probed_run = wildcards.run
    if not SUITE.builds_index(wildcards.run):
        # The index was published, so one probe serves all runs with the same tasks.
        probed_run = SUITE.task_owner[wildcards.run]
    return [index, f"<results>/{probed_run}/retriever.json"]


def shards_of(wildcards):
    """Return the encoded shards of a run whose passages several jobs encode, or no file."""
    shards = SUITE.runs[wildcards.run]["retriever"]["shards"]
    if shards == 1:
        return []
    names = [f"{number:04}-of-{shards:04}.f32" for number in range(shards)]
    return [f"<results>/{wildcards.run}/index/shards/{name}" for name in names]


def starting_model_of(wildcards):
    """Return the files of the models that a run's policies start from, if rules make them.

    These are the result of a cold start, or the random models of the scale `tiny`.
    """
    if wildcards.run in SUITE.cold_start_owner:
        return [f"<results>/{SUITE.cold_start_owner[wildcards.run]}/bootstrap/bootstrap.json"]
    return SUITE.model_files(wildcards.run) if SUITE.scale == "tiny" else []


def evaluated_models_of(wildcards):
    """Return the files that show that the models of an evaluation are complete.

    These are the records of the trainings whose policies play, and the run's starting model.
    """
    trained_runs = SUITE.trained_runs_for(wildcards.run, wildcards.state)
    trainings = [f"<results>/{run}/train/done.json" for run in trained_runs]
    return [*trainings, *starting_model_of(wildcards)]


def table_results(table):
    """Return the evaluations of a table, and the records of the trainings whose policies play."""
    evaluations = [path for paths in TABLE_INPUTS[table].values() for path in paths]
    trained_runs = {}
    for path in map(Path, evaluations):
        trained_runs |= dict.fromkeys(SUITE.trained_runs_for(path.parents[1].name, path.stem))
    return [*evaluations, *(f"<results>/{run}/train/done.json" for run in trained_runs)]


onstart:
    # These locks replace Snakemake's own, which stays behind when its process is killed, and which
    # would keep other suites out of the working folder.
    jobs = list(workflow.dag.needrun_jobs())
    with contextlib.ExitStack() as stack:
        try:
            for folder in SUITE.written_folders(path for job in jobs for path in job.output):
                stack.enter_context(owned(ensure_writable(folder)))
        except FolderError as error:
            raise SystemExit(f"error: {error}") from None
        atexit.register(stack.pop_all().close)
    SUITE.write_configs(job.wildcards_dict.get("run") for job in jobs)
    end_at_second_interrupt(
        "error: ended by a second Ctrl-C; the same command goes on from what is saved"
    )


# Both messages are printed at exit, so that they come after Snakemake's own last lines.
onsuccess:
    atexit.register(print, success_message(config.get("results", "results"), SUITE.name))


onerror:
    # Snakemake's own log obeys --quiet; the causes of a failure are printed in any case.
    unfinished = [path for job in workflow.dag.needrun_jobs() for path in job.log]
    atexit.register(print, failure_message(unfinished, STARTED, log), file=sys.stderr)
