"""Attacks of programs on network, files, kernel and secrets, in every tier that isolates."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from rollout.sandbox import RunLimits, RunResult, Sandbox, Verdict
from tests.support.sandboxes import assert_refused, run, started

# --- network


def test_no_network(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert_refused(box, f"socket.create_connection(('127.0.0.1', {port}), timeout=2)")
    assert_refused(
        box, "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))"
    )
    assert_refused(box, "socket.socket(socket.AF_INET6)")
    assert_refused(box, "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)")


def test_no_unix_sockets(box: Sandbox) -> None:
    name = f"\0sandbox-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(name)
        assert_refused(box, "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)")
        assert_refused(
            box, "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"
        )  # datagram sockets could send to any address
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(1)
    assert (
        run(box, "import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))").stdout
        == "b'x'\n"
    )


# --- files


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/etc/shadow", "/proc/kallsyms", "/sys/kernel", "/home", "/var"]
)
def test_system_files_cannot_be_read(box: Sandbox, path: str) -> None:
    assert_refused(
        box, f"os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read()"
    )


def test_other_files_of_this_user_cannot_be_reached(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("expected output")
    secret.chmod(0o644)
    assert_refused(box, f"open({str(secret)!r}).read()")
    assert_refused(box, f"open({str(secret)!r}, 'w')")
    assert_refused(box, f"open({str(tmp_path / 'new')!r}, 'w')")
    assert_refused(box, "open('escape').read()", f"os.symlink({str(secret)!r}, 'escape')")
    source = f"""
import os
for change in (lambda p: os.chmod(p, 0), lambda p: os.utime(p, (1, 1)), lambda p: os.chown(p, 1, 1), os.remove):
    try:
        change({str(secret)!r})
    except OSError:
        pass
"""
    assert run(box, source).verdict is Verdict.OK
    assert stat.S_IMODE(secret.stat().st_mode) == 0o644
    assert secret.stat().st_mtime > 1_000_000
    assert secret.read_text() == "expected output"


@pytest.mark.parametrize("folder", ["/", "/usr", "/usr/lib", "/dev", "/proc", "/var/tmp", "/opt"])
def test_nothing_is_written_outside(box: Sandbox, folder: str) -> None:
    assert_refused(box, f"open('{folder}/left-behind', 'w')")
    assert not Path(folder, "left-behind").exists()


def test_the_interpreter_cannot_be_changed(box: Sandbox) -> None:
    assert_refused(box, "open(os.__file__, 'a')")
    assert_refused(box, "os.truncate(os.__file__, 0)")
    mode = Path(os.__file__).stat().st_mode
    run(box, "import os\nwith open(os.__file__) as file: os.fchmod(file.fileno(), 0o777)")
    assert Path(os.__file__).stat().st_mode == mode


def test_files_handed_back_are_files_of_the_box(box: Sandbox) -> None:
    source = """
import os
os.symlink("/etc/passwd", "link"); os.symlink("/etc", "folder")
open("plain", "w").write("mine")
"""

    async def handed() -> list[bytes | None]:
        async with box.session(RunLimits(wall_s=30, memory_mb=256)) as session:
            await session.run(source)
            return [
                await session.get(name) for name in ("link", "folder/passwd", "plain", "absent")
            ]

    assert asyncio.run(handed()) == [None, None, b"mine", None]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a\0b"])
def test_paths_out_of_the_box_are_refused_by_the_host(box: Sandbox, name: str) -> None:
    with pytest.raises(ValueError, match="no path in a box"):
        run(box, "", files={name: b""})


# --- the kernel


CALLS = {
    "unshare": 272, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "setns": 308, "open_tree": 428,
    "fsopen": 430, "io_uring_setup": 425, "bpf": 321, "keyctl": 250, "add_key": 248, "perf_event_open": 298,
    "userfaultfd": 323, "ptrace": 101, "memfd_create": 319, "shmget": 29, "mq_open": 240, "init_module": 175,
    "kexec_load": 246, "reboot": 169, "personality": 135, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "mknod": 133, "setuid": 105, "capset": 126, "sched_setscheduler": 144, "setpriority": 141, "sethostname": 170,
    "settimeofday": 164, "swapon": 167, "quotactl": 179, "fanotify_init": 300, "kcmp": 312, "pidfd_getfd": 438,
    "process_madvise": 440, "seccomp": 317, "syslog": 103, "clone3": 435, "a call of the future": 600,
}  # fmt: skip


def test_system_calls_that_no_program_needs_are_refused(box: Sandbox) -> None:
    source = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {CALLS}.items():
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38):  # EPERM, ENOSYS
        print(name)
"""
    result = run(box, source)
    assert (result.stdout, result.verdict) == ("", Verdict.OK)


@pytest.mark.parametrize(
    "call",
    [
        "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",  # clone with a new user namespace
        "libc.syscall(56, 0x20000 | 17, 0, 0, 0, 0)",  # and with a new mount namespace
        "libc.prctl(1, 0, 0, 0, 0)",  # outliving the warden
        "libc.prctl(22, 1, 0, 0, 0)",
        "libc.ioctl(0, 0x5412, b'x')",  # TIOCSTI: typing on the terminal
        "libc.ioctl(0, 0x541C, b'x')",
    ],
    ids=["userns", "mountns", "pdeathsig", "seccomp", "tiocsti", "tioclinux"],
)
def test_arguments_that_no_program_needs_are_refused(box: Sandbox, call: str) -> None:
    assert run(box, f"import ctypes\nlibc = ctypes.CDLL(None)\nprint({call})").stdout == "-1\n"


def test_a_call_of_another_architecture_kills_the_program(box: Sandbox) -> None:
    # int 0x80 makes a 32-bit call, whose numbers mean something else; 20 would be getpid there
    source = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("b814000000cd80c3"))
ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("ran")
"""
    result = run(box, source)
    assert (result.stdout, result.exit_code) == ("", -31)  # SIGSYS


def test_no_privileges(box: Sandbox) -> None:
    assert (
        run(box, "import os\nprint(os.getuid() == os.geteuid() and 0 not in os.getgroups())").stdout
        == "True\n"
    )
    source = """
import ctypes
class Capabilities(ctypes.Structure):
    _fields_ = [("bits", ctypes.c_uint32 * 6)]
header, found = (ctypes.c_uint32 * 2)(0x20080522, 0), Capabilities()
ctypes.CDLL(None).syscall(125, header, ctypes.byref(found))  # capget
print(sum(found.bits))
"""
    assert run(box, source).stdout == "0\n"


# --- secrets


def test_the_environment_of_the_host_does_not_reach_programs(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run(box, "import os\nprint(*sorted(os.environ))").stdout.split()
    assert set(names) <= {
        "HOME", "LANG", "LC_CTYPE", "MKL_NUM_THREADS", "MPLBACKEND", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH",
        "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "TMPDIR",
    }  # fmt: skip


SCAN = """
import ctypes
libc = ctypes.CDLL(None)
libc.memmem.restype, libc.memmem.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] * 2
needle = ctypes.create_string_buffer(bytes(reversed(NEEDLE)))  # written backwards, the text itself is no match
length = len(needle) - 1
for line in open("/proc/self/maps"):
    place, rights, *rest = line.split()
    if rights.startswith("r") and not rest[-1].startswith("[v"):
        at, high = (int(part, 16) for part in place.split("-"))
        while at := libc.memmem(at, high - at, ctypes.addressof(needle), length) or 0:
            if at != ctypes.addressof(needle):
                print("found")
            at += 1
"""


@pytest.mark.slow
def test_a_key_of_the_host_is_not_in_a_programs_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COACH_API_KEY", "sk-tiger-1234")
    with Path(__file__).open() as handle:  # an open file of the host too
        os.set_inheritable(handle.fileno(), True)
        box = started("namespaces")
        try:
            assert run(box, OPEN_DESCRIPTORS).stdout == "0 1 2\n"
            assert run(box, SCAN.replace("NEEDLE", repr(b"sk-tiger-1234"[::-1]))).stdout == ""
            assert run(
                box,
                "mine = 'sk-tiger-1234'\n" + SCAN.replace("NEEDLE", repr(b"sk-tiger-1234"[::-1])),
            ).stdout
        finally:
            box.close()


OPEN_DESCRIPTORS = """
import os
descriptors = []
for n in range(1 << 16):
    try: os.fstat(n)
    except OSError: continue
    descriptors.append(n)
print(*descriptors)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_a_program_has_three_descriptors_and_a_cell_its_channel_too(tier: str) -> None:
    with Path(
        __file__
    ).open() as handle:  # of the host, which every process of the sandbox could inherit
        os.set_inheritable(handle.fileno(), True)
        box = started(tier)

    async def cells() -> str:
        async with box.session(RunLimits(wall_s=30, memory_mb=256)) as session:
            await session.put("a", b"1")  # files go in and out through the warden
            assert await session.get("a") == b"1"
            return (await session.run(OPEN_DESCRIPTORS)).stdout

    try:
        assert run(box, OPEN_DESCRIPTORS, stdin="x", files={"a": b"1"}).stdout == "0 1 2\n"
        listing = run(
            box, "import os\nprint(*os.listdir('/proc/self/fd'))"
        )  # 3 is the folder that is listed
        assert (
            listing.stdout == "0 1 2 3\n" if tier == "namespaces" else listing.verdict is Verdict.RE
        )
        assert asyncio.run(cells()) == "0 1 2 3\n"
    finally:
        box.close()


def test_an_earlier_program_leaves_no_trace(spacious: Sandbox) -> None:
    for _ in range(4):  # more than there are warm processes
        earlier = run(
            spacious, "# marker-in-source\nprint(input() + '-out')", stdin="marker-in-input"
        )
        assert earlier.stdout == "marker-in-input-out\n"
    for marker in (b"marker-in-source", b"marker-in-input"):
        assert run(spacious, SCAN.replace("NEEDLE", repr(marker[::-1]))).stdout == ""


# --- what must keep working


def test_threads_and_numerical_packages(box: Sandbox) -> None:
    source = """
import threading, numpy as np
threads = [threading.Thread(target=lambda: None) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print(float((np.ones((300, 300)) @ np.ones((300, 300))).sum()))
"""
    assert run(box, source).stdout == "27000000.0\n"  # 300 * 300 * 300


def test_processes_of_the_standard_library(spacious: Sandbox) -> None:
    source = """
import multiprocessing, subprocess, sys
print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout.strip())
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, 2]))
"""
    assert run(spacious, source, RunLimits(processes=48)).stdout == "42\n[1, 2]\n"


def test_concurrent_programs_do_not_see_each_other(box: Sandbox) -> None:
    async def both() -> list[RunResult]:
        first = box.run(
            "import time, os\nopen('mine', 'w').write('x')\ntime.sleep(0.5)\nprint(os.listdir('.'))"
        )
        second = box.run("import time, os\ntime.sleep(0.2)\nprint(os.listdir('.'))")
        return list(await asyncio.gather(first, second))

    assert [result.stdout for result in asyncio.run(both())] == ["['mine']\n", "[]\n"]
