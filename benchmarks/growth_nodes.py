"""CPU time of an update as its data-parallel ranks spread over 2 and 4 nodes, against one node.

Nodes are network namespaces of this machine, each with its own address and one rank (`tests/support/nodes.py`). All
updates have the same samples, so more CPU time than on one node is what nodes add: gradients and weights that are
exchanged over the network, and work that every rank repeats. The nodes share the machine's cores, so seconds of a clock
would say nothing about them.

Without network namespaces (they need root), the ranks are processes of one node, and a line says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch.distributed import TCPStore, barrier  # type: ignore[attr-defined]

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.groups import tool_trace
from benchmarks.support.result import print_result
from benchmarks.support.training import LR, make_model
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from tests.support.nodes import Nodes, missing

ROOT = Path(__file__).resolve().parents[1]
NODES = (1, 2, 4)
GOALS = {2: 1.2, 4: 1.5}
VOCAB = 2048
TASKS = 16
MICROBATCH_TOKENS = 4096
UPDATES = 4
PORT = 29500
TIMEOUT_S = 900.0


def make_microbatches() -> list[Microbatch]:
    """Return the micro-batches of a step: eight chats of four turns on each task."""
    samples: list[Sample] = []
    for task in range(TASKS):
        trace = tool_trace(
            VOCAB, turns=4, chats=8, task_tokens=128, reply_tokens=16, result_tokens=16
        )
        for sample in trace:
            # The first token differs, so that tasks share no prefix.
            prompt_ids = (task, *sample.prompt_ids[1:])
            trajectory = f"{task}.{sample.trajectory}"
            samples.append(
                replace(sample, task=str(task), trajectory=trajectory, prompt_ids=prompt_ids)
            )
    return list(pack(samples, MICROBATCH_TOKENS))


def run_rank(model: Path, address: str, rank: int, ranks: int) -> None:
    """Take a warm-up update and then `UPDATES` updates as one rank; print its CPU seconds per update.

    This ends the process.
    """
    spec = TrainerSpec(model=str(model), lr=LR, objective=Objective(), dp=ranks)
    store = TCPStore(address, PORT, ranks, is_master=rank == 0)
    init_process_groups(spec, rank=rank, threads=1, store=store)
    trainer = MegatronTrainer(spec)
    microbatches = make_microbatches()
    trainer.update(microbatches)
    barrier()
    began = time.process_time()
    for _ in range(UPDATES):
        trainer.update(microbatches)
    print((time.process_time() - began) / UPDATES, flush=True)
    barrier()
    # The store of rank 0 must outlive the barrier of the others.
    time.sleep(1 if rank == 0 else 0)
    os._exit(0)


def cpu_seconds_of_update(folder: Path, count: int, *, namespaces: bool) -> float:
    """Return the CPU seconds that all ranks together take for an update on `count` nodes."""
    logs = [folder / f"rank{rank}.log" for rank in range(count)]
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        nodes = Nodes(folder)
        stack.callback(nodes.close)
        address = nodes.address(1) if namespaces else "127.0.0.1"
        interface = "net" if namespaces else "lo"
        for rank, log in enumerate(logs):
            command = ["env", f"GLOO_SOCKET_IFNAME={interface}", sys.executable, "-W", "ignore"]
            command += [__file__, "--rank", str(rank), "--ranks", str(count)]
            command += ["--model", str(folder / "model"), "--address", address]
            if namespaces:
                process = nodes.start(nodes.add(), command, ROOT, log)
            else:
                with log.open("wb") as output:
                    process = subprocess.Popen(command, stdout=output, stderr=output)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            process.wait(TIMEOUT_S)
    texts = [log.read_text() for log in logs]
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank failed:\n" + "\n".join(texts))
    return sum(float(text.splitlines()[-1]) for text in texts)


def main() -> None:
    """Measure an update on 1, 2 and 4 nodes; print a result for each against one node."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, help="this process is this rank, of --ranks")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--address")
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.model, options.address, options.rank, options.ranks)

    reason = missing()
    if reason:
        print(f"no nodes here ({reason}): the ranks are processes of one node")
    seconds = {}
    with tempfile.TemporaryDirectory(prefix="growth-nodes-") as name:
        folder = Path(name)
        make_model(folder / "model", vocab=VOCAB, hidden=128, layers=2)
        for count in NODES:
            seconds[count] = cpu_seconds_of_update(folder, count, namespaces=not reason)
            print(f"{count} nodes: {seconds[count]:.2f} CPU s for an update", flush=True)
    for count in NODES[1:]:
        print_result(
            f"growth_nodes_{count}",
            seconds[count] / seconds[1],
            goal=GOALS[count],
            at_most=True,
            reference="one_node",
            repeats=UPDATES,
        )


if __name__ == "__main__":
    main()
