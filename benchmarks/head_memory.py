"""Peak memory of the head, forward and backward, on 4096 rows of 32k tokens: in chunks, and with all logits at once."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from mcore_mas.megatron.model.decoder import logprobs_and_entropy
from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups

_ROWS, _VOCAB, _HIDDEN = 4096, 32768, 64


def run(kind: str) -> None:
    """Print the peak memory in GiB above that of the inputs."""
    init_process_groups(rank=0, threads=1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, _HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(_VOCAB, _HIDDEN, generator=generator, requires_grad=True)
    labels, temperatures = (
        torch.randint(0, _VOCAB, (_ROWS,), generator=generator),
        torch.ones(_ROWS),
    )
    before = peak_gib()
    if kind == "chunks":
        logprobs, entropy = logprobs_and_entropy(
            hidden, weight, labels, temperatures, _VOCAB, embeds=False, exact=False
        )
    else:
        logp = torch.log_softmax(hidden @ weight.t() / temperatures[:, None], dim=-1)
        logprobs, entropy = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    (logprobs + entropy).sum().backward()
    print(peak_gib() - before)
    destroy_process_groups()


def peak_gib() -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kind", choices=("chunks", "whole"), help="only run one, and print its peak memory"
    )
    kind = parser.parse_args().kind
    if kind:
        run(kind)
        return
    peaks = {}
    for kind in ("chunks", "whole"):
        command = [sys.executable, __file__, "--kind", kind]
        peaks[kind] = float(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
        )
        print(f"{kind}: {peaks[kind]:.2f} GiB")
    print(
        f"name=head_memory ratio={peaks['whole'] / peaks['chunks']:.2f} goal=3.00 reference=all_logits_at_once n=1"
    )


if __name__ == "__main__":
    main()
