"""Ray over all machines of a Slurm job."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.slurm import job_machines
from rollout.base.network import free_port
from rollout.base.processes import start_group, stop_group

# Seconds within which all machines of a job must join its Ray.
_JOIN_S = 300.0


@contextmanager
def ray_over_machines(machines: int, cpus: int, log: Path) -> Iterator[str | None]:
    """Run a Ray over all machines of this job for the block; yield its address.

    This process must be on the first machine. Ray is started there, and by `srun` on the others, in
    the working folder of this process. On one machine nothing is started, and None is yielded.

    Args:
        machines: number of machines of the job.
        cpus: number of CPUs that Ray uses of each machine; it counts the GPUs itself.
        log: file for the output of Ray.

    Raises:
        TrainingError: Ray's token cannot be made, or not all machines join within five minutes.
    """
    if machines == 1:
        yield None
        return

    # Importing Ray takes seconds, which a job on one machine does not need here.
    os.environ["RAY_AUTH_MODE"] = "token"
    import ray

    from mcore_mas.runtime.local_ray import make_private_token

    try:
        make_private_token()  # in the home folder, which the machines share
    except OSError as error:
        raise TrainingError(f"Ray's token cannot be made in ~/.ray: {error}") from error

    head_ip = address_in_slurm_network() or ray.util.get_node_ip_address()
    port = free_port(head_ip)
    address = f"{head_ip}:{port}"
    start = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--disable-usage-stats",
        f"--num-cpus={cpus}",
    ]
    start_head = [
        *start,
        "--head",
        f"--node-ip-address={head_ip}",
        f"--port={port}",
        "--include-dashboard=false",
    ]
    start_others = [
        "srun",
        "--overlap",
        "--relative=1",
        f"--nodes={machines - 1}",
        f"--ntasks={machines - 1}",
        # The environment has the binding of this step (SLURM_CPU_BIND), and the job has other CPUs
        # on other machines.
        "--cpu-bind=none",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        *start,
        f"--address={address}",
    ]
    with ExitStack() as stack:
        for command, expected in ((start_head, 1), (start_others, machines)):
            process = start_group(command, log=log)
            stack.callback(stop_group, process)
            _wait_for_machines(process, address, expected, log)
        yield address


def address_in_slurm_network() -> str | None:
    """Return this machine's address in the network in which Slurm reaches the job's last machine.

    Ray would choose the network of the default route, or loopback if there is none. None: Slurm
    does not tell, or this machine has no address there.
    """
    command = ["scontrol", "--oneliner", "show", "node", job_machines()]
    try:
        nodes = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        addresses = re.findall(r" NodeAddr=(\S+)", nodes)
        if not addresses:
            return None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket sends nothing, and chooses the route.
            probe.connect((addresses[-1], 9))
            address: str = probe.getsockname()[0]
    except OSError:
        return None
    return None if address.startswith("127.") else address


def _wait_for_machines(
    process: subprocess.Popen[bytes], address: str, expected: int, log: Path
) -> None:
    """Wait until a number of machines has joined Ray.

    Args:
        process: starts Ray on the machines; it must not end.
        address: address of Ray.
        expected: number of machines.
        log: log file of the process, for the error message.

    Raises:
        TrainingError: the process has ended, or the machines do not join in time.
    """
    import ray

    deadline = time.monotonic() + _JOIN_S
    joined = 0
    while joined < expected:
        has_ended = process.poll() is not None
        if has_ended or time.monotonic() > deadline:
            reason = ", and the process that starts them has ended"
            if not has_ended:
                reason = f" in {_JOIN_S:.0f} s"
            raise TrainingError(
                f"{joined} of {expected} machines joined Ray at {address}{reason}; see {log}"
            )
        try:
            ray.init(address=address, log_to_driver=False)
            joined = sum(node["Alive"] for node in ray.nodes())
        except ConnectionError:
            joined = 0  # the head has not started yet
        ray.shutdown()
        time.sleep(1)
