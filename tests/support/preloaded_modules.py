"""Imports of the processes from which ranks, programs and workers of tests are forked."""

import gc
import importlib

gc.disable()  # modules are no garbage

from tests.support import ray_forks  # noqa: E402

ray_forks.import_ray()

import tests.support.in_process  # noqa: E402
import tests.support.ranks  # noqa: E402, F401
from mcore_mas.tracking.mlflow_store import set_mlflow_variables  # noqa: E402

# The modules of jobs and commands, also those that MLflow, Ray and they import when they first use them
set_mlflow_variables()
for name in (
    "alembic.command",
    "git",
    "mcore_mas.cli.main",
    "mcore_mas.evaluation.evaluate",
    "mlflow.pyfunc",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.tracing.trace_manager",
    "pyarrow.json",
    "pyarrow.pandas_compat",
    "pydantic.v1",
    "ray._common.usage.usage_lib",
    "ray.dag.compiled_dag_node",
    "ray.dashboard.modules.log.log_manager",
    "rollout.engines.embedded.build",
    "rollout.engines.embedded.host",
    "snakemake.cli",
    "transformers.convert_slow_tokenizer",
):
    importlib.import_module(name)

gc.enable()
gc.freeze()  # excludes the modules from the garbage collections of forks
