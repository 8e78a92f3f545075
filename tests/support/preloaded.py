"""Imports of the process from which ranks and programs of tests are forked."""

import gc

import snakemake.cli  # noqa: F401

import tests.support.in_process
import tests.support.ranks  # noqa: F401

gc.freeze()  # excludes the modules from the garbage collections of forks
