"""Programs that multiply, linger, signal others, or fill memory and disk, in every tier that isolates."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from rollout.sandbox import RunLimits, Sandbox, Verdict
from rollout.sandbox.jail import Cores
from tests.support.sandboxes import assert_refused, run

# --- processes


def test_a_fork_bomb_hits_its_limit_and_leaves_no_process(spacious: Sandbox) -> None:
    source = """
import os, time
count = 1
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except BlockingIOError:
    print(count)
"""
    result = run(spacious, source)
    assert int(result.stdout) == 24  # processes of the tree, with the program itself
    assert result.wall_s < 15  # the sleeping children end with the program


@pytest.mark.parametrize(
    "body",
    ["os.fork()", "os.posix_spawn('/bin/true', ['true'], {})", "os.execv('/bin/true', ['true'])"],
)
def test_without_namespaces_there_is_one_process(box: Sandbox, body: str) -> None:
    if box.tier != "landlock":
        pytest.skip(f"tier {box.tier} allows processes and ends them with the program")
    assert_refused(box, body)


def test_an_exponential_fork_bomb_ends_at_its_time_limit(spacious: Sandbox) -> None:
    source = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = run(spacious, source, RunLimits(wall_s=1.0, processes=16))
    assert result.verdict is Verdict.TLE
    assert run(spacious, "print('still here')").stdout == "still here\n"


def test_a_program_and_its_children_share_the_cores_of_the_limits(
    box: Sandbox,
) -> None:
    source = """
import os, threading
seen = [os.sched_getaffinity(0)]
thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
thread.start(); thread.join()
print(len(set().union(*seen)))
"""
    wider = "import os\nos.sched_setaffinity(0, range(os.cpu_count()))"
    machine_cores = len(os.sched_getaffinity(0))
    assert [run(box, source, RunLimits(cores=n)).stdout for n in (1, 2, 99)] == [
        f"{min(n, machine_cores)}\n" for n in (1, 2, 99)
    ]
    assert "PermissionError" in run(box, wider).stderr


def test_jobs_are_spread_over_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5})
    monkeypatch.setattr(
        os, "getpid", lambda: 4
    )  # which of three cores comes first depends on the process id
    cores = Cores()
    assert [cores.take(1), cores.take(2), cores.take(1)] == [[3], [5, 2], [3]]
    cores.give_back([5, 2])
    assert cores.take(9) == [5, 2, 3]


def test_a_daemon_does_not_outlive_its_program(spacious: Sandbox) -> None:
    source = """
import os, time, ctypes
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"stayed-behind", 0, 0, 0)
        time.sleep(60)
    os._exit(0)
time.sleep(0.2)
print("done")
"""
    result = run(spacious, source)
    assert (result.stdout, result.verdict) == ("done\n", Verdict.OK)
    # `info` is None for a process that ends meanwhile.
    names = {process.info["name"] for process in psutil.process_iter(["name"])}
    assert "stayed-behind" not in names


@pytest.mark.parametrize("target", ["os.getppid()", "1", "-1"], ids=["parent", "init", "all"])
def test_signals_reach_no_other_process(box: Sandbox, target: str) -> None:
    result = run(box, f"import os\ntry: os.kill({target}, 9)\nexcept OSError: pass\nprint('alive')")
    assert result.verdict is Verdict.OK
    assert result.stdout == "alive\n"


@pytest.mark.parametrize("pid", ["os.getppid()", "1"])
@pytest.mark.parametrize(
    "call",
    [
        "libc.ptrace(16, {pid}, 0, 0)",
        "libc.syscall(310, {pid}, 0, 0, 0, 0, 0)",  # process_vm_readv
        "libc.syscall(434, {pid}, 0)",  # pidfd_open
        "libc.setpriority(0, {pid}, 19)",
        "libc.syscall(203, {pid}, 8, (ctypes.c_ulong * 1)(1))",  # sched_setaffinity
        "libc.syscall(302, {pid}, 7, (ctypes.c_ulong * 2)(9, 9), 0)",  # prlimit64
        "libc.fcntl(0, 8, {pid})",  # F_SETOWN: a signal sent by the kernel
    ],
    ids=["ptrace", "memory", "pidfd", "priority", "affinity", "limits", "owner"],
)
def test_other_processes_cannot_be_reached(box: Sandbox, call: str, pid: str) -> None:
    result = run(box, f"import os, ctypes\nlibc = ctypes.CDLL(None)\nprint({call.format(pid=pid)})")
    assert result.stdout == "-1\n", result


@pytest.mark.parametrize("name", ["environ", "mem", "maps", "cwd", "fd", "root"])
def test_the_parent_is_not_read_through_proc(box: Sandbox, name: str) -> None:
    function = "os.listdir" if name in ("fd", "cwd", "root") else "open"
    for pid in ("1", "{os.getppid()}"):
        assert_refused(box, f"{function}(f'/proc/{pid}/{name}')")


def test_a_stopped_program_runs_out_of_time(box: Sandbox) -> None:
    result = run(
        box, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", RunLimits(wall_s=0.5)
    )
    assert result.verdict is Verdict.TLE


def test_spinning_with_closed_streams_runs_out_of_time(box: Sandbox) -> None:
    result = run(
        box,
        "import os\nfor n in range(3): os.close(n)\nwhile True: pass",
        RunLimits(wall_s=20, cpu_s=1),
    )
    assert result.verdict is Verdict.TLE
    assert result.cpu_s < 2.5


@pytest.mark.slow
def test_ignoring_sigxcpu_does_not_help(box: Sandbox) -> None:
    source = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(box, source, RunLimits(wall_s=20, cpu_s=1)).verdict is Verdict.TLE


def test_sleep_is_wall_time(box: Sandbox) -> None:
    result = run(box, "import time\ntime.sleep(60)", RunLimits(wall_s=0.3))
    assert result.verdict is Verdict.TLE
    assert 0.3 <= result.wall_s < 5


# --- memory and output


def test_memory_bomb(box: Sandbox) -> None:
    result = run(box, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert result.verdict is Verdict.MLE
    assert result.memory_mb < 300  # 256 MiB of the program and the interpreter


def test_memory_bomb_of_many_processes(spacious: Sandbox) -> None:
    if spacious.pool is None or spacious.pool.groups is None:
        pytest.skip("this user may not set the memory of a group of processes")
    source = """
import os, time
for _ in range(11):
    if os.fork() == 0:
        break
x = [bytearray(b"1") * (100 << 20)]
time.sleep(0.5)
for _ in range(11):
    try: os.wait()
    except ChildProcessError: os._exit(0)
    except OSError: pass
raise SystemExit(7)
"""
    limits = RunLimits(
        wall_s=30, memory_mb=256, disk_mb=16
    )  # 1200 MiB together; 272 MiB are allowed
    assert run(spacious, source, limits).verdict in (Verdict.MLE, Verdict.RE)
    assert any(group.oom_kills() for group in spacious.pool.groups.groups)
    assert run(spacious, "print(1)").verdict is Verdict.OK


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut(box: Sandbox, stream: str) -> None:
    source = f"import sys\nwhile True: sys.{stream}.write('x' * 65536)"
    result = run(box, source, RunLimits(output_kb=64, file_mb=2))
    assert result.verdict is Verdict.OLE
    assert len(getattr(result, stream)) == 64 << 10
    assert result.wall_s < 10


@pytest.mark.parametrize(
    "write",
    ["f.write(b'x' * (1 << 20))", "f.seek(1 << 40); f.write(b'x')"],
    ids=["large", "sparse"],
)
def test_files_have_a_size(box: Sandbox, write: str) -> None:
    source = f"""
try:
    with open("big", "wb", buffering=0) as f:
        for _ in range(64):
            {write}
except OSError as error:
    print(error.errno)
"""
    assert run(box, source).stdout == "27\n"  # EFBIG


def test_filling_the_disk(box: Sandbox) -> None:
    source = """
import time
n = 0
try:
    for n in range(100):
        with open(f"f{n}", "wb") as f:
            f.write(b"x" * (4 << 20))
        time.sleep(0.01)
except OSError as error:
    print(n, error.errno)
"""
    limits = RunLimits(disk_mb=16, file_mb=8, memory_mb=256)
    result = run(box, source, limits)
    if box.tier == "namespaces":
        assert result.stdout == "4 28\n"  # ENOSPC at the fifth file of 4 MiB
    else:
        assert result.verdict is Verdict.OLE  # the warden checks every 0.1 s


@pytest.mark.slow
def test_inode_bomb(box: Sandbox) -> None:
    source = """
import os
n = 0
try:
    for n in range(200_000):
        os.mkdir(f"d{n}")
except OSError as error:
    print(n, error.errno)
"""
    result = run(box, source, RunLimits(files=100))
    if box.tier == "namespaces":
        assert result.stdout == "100 28\n"  # ENOSPC
    else:
        assert result.verdict is Verdict.OLE
    boxes = box.pool.boxes if box.pool else None
    if boxes is not None:
        deadline = time.monotonic() + 20
        while any(boxes.glob("*/*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not list(boxes.glob("*/*"))
