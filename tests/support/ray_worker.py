"""Script that Ray starts for a worker or an agent: asks for a fork that becomes it, and ends with it.

It imports little, not even pathlib, because it is a process of its own beside each worker.
"""

import json
import os
import signal
import socket
import sys

# Variable of the environment with the name of the socket
VARIABLE = "MCORE_MAS_RAY_FORKS"
# Id of the job of a cluster's first driver. The forks cannot work for other jobs; see `ray_forks.import_ray`.
JOB_ID = "01000000"


def main() -> None:
    """Ask for a fork, or run Ray's own script for a worker of another job, or of none as yet."""
    is_worker = sys.argv[1].endswith("default_worker.py")
    if is_worker and os.environ["RAY_JOB_ID"] != JOB_ID:
        script = os.path.join(os.path.dirname(sys.argv[1]), "setup_worker.py")  # noqa: PTH118, PTH120
        os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])
    request = {
        "arguments": sys.argv[1:],
        "cwd": os.getcwd(),  # noqa: PTH109
        "env": dict(os.environ),
        "blocked_signals": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "leads_group": os.getpgrp() == os.getpid(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect("\0" + os.environ[VARIABLE])
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        connection.recv(1)  # returns when the worker has ended


if __name__ == "__main__":
    main()
