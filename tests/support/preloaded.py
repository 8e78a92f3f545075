"""Imports of the process from which ranks and programs of tests are forked."""

import gc

from tests.support import ray_forks

ray_forks.import_ray()

import snakemake.cli  # noqa: E402, F401

import tests.support.in_process  # noqa: E402
import tests.support.ranks  # noqa: E402, F401

gc.freeze()  # excludes the modules from the garbage collections of forks
