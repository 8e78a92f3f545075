"""What a process has imported from which ranks and programs of tests are forked."""

import gc

import snakemake.cli  # noqa: F401

import tests.support.in_process
import tests.support.ranks  # noqa: F401

gc.freeze()  # no fork looks for garbage among modules
