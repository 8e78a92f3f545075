"""Peak memory of the output layer, forward and backward, on 4096 tokens: in chunks, and all at once.

The vocabulary has 32k tokens.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.process import memory_bytes
from benchmarks.support.result import print_result
from mcore_mas.megatron.model.head import logprobs_and_entropy
from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups

_ROWS = 4096
_VOCAB = 32768
_HIDDEN = 64
_GOAL = 3.0


def print_peak(kind: str) -> None:
    """Print the peak memory of this process in GiB above that of the inputs."""
    init_process_groups(rank=0, threads=1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, _HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(_VOCAB, _HIDDEN, generator=generator, requires_grad=True)
    labels = torch.randint(0, _VOCAB, (_ROWS,), generator=generator)
    temperatures = torch.ones(_ROWS)
    before = memory_bytes()
    if kind == "chunks":
        logprobs, entropy = logprobs_and_entropy(
            hidden, weight, labels, temperatures, _VOCAB, is_embedding=False, exact=False
        )
    else:
        all_logprobs = torch.log_softmax(hidden @ weight.t() / temperatures[:, None], dim=-1)
        logprobs = all_logprobs.gather(1, labels[:, None])[:, 0]
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    (logprobs + entropy).sum().backward()
    print((memory_bytes() - before) / 2**30)
    destroy_process_groups()


def measure_peak(kind: str) -> float:
    """Return the peak memory of a new process in GiB."""
    command = [sys.executable, __file__, "--kind", kind]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    peak_gib = float(process.stdout.split()[-1])
    print(f"{kind}: {peak_gib:.2f} GiB")
    return peak_gib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kind", choices=("chunks", "whole"), help="only run one, and print its peak memory"
    )
    kind = parser.parse_args().kind
    if kind:
        print_peak(kind)
        return
    chunks_gib = measure_peak("chunks")
    whole_gib = measure_peak("whole")
    ratio = whole_gib / chunks_gib
    print_result("head_memory", ratio, goal=_GOAL, reference="all_logits_at_once", repeats=1)


if __name__ == "__main__":
    main()
