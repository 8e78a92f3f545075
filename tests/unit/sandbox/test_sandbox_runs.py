"""Runs of programs: verdicts, files, cancellation, and failures of the sandbox or its host."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rollout.base.errors import EnvError
from rollout.base.restarts import Restarts
from rollout.sandbox import RunLimits, Sandbox, SandboxError, SandboxUnavailable, Verdict
from rollout.sandbox import box as box_module
from rollout.sandbox import jail as jail_module
from rollout.sandbox.guest import wire
from rollout.sandbox.pool import BOXES, JailPool
from tests.support.sandboxes import run, started

ROOT = Path(__file__).resolve().parents[3]
SLEEPING_PROGRAM = "import ctypes, time\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\nprint('on', flush=True)\ntime.sleep({s})\n"  # noqa: E501


def alive(name: str) -> bool:
    return any(process.info["name"] == name for process in psutil.process_iter(["name"]))


def wait_until(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("source", "verdict", "code"),
    [
        ("", "OK", 0),
        ("raise SystemExit", "OK", 0),
        ("raise SystemExit(3)", "RE", 3),
        ("raise SystemExit('so')", "RE", 1),
        ("1 / 0", "RE", 1),
        ("def", "RE", 1),
        ("import os; os._exit(7)", "RE", 7),
        ("import os; os.abort()", "RE", -6),
        ("raise MemoryError", "MLE", 251),
        ("bytearray(1 << 40)", "MLE", 251),
        ("def f(): f()\nf()", "RE", 1),
    ],
)
def test_verdict_and_exit_code(box: Sandbox, source: str, verdict: str, code: int) -> None:
    result = run(box, source)
    assert (result.verdict, result.exit_code) == (verdict, code)


def test_input_and_output(box: Sandbox) -> None:
    source = (
        "import sys\na, b = map(int, input().split())\nprint(a + b)\nprint('é', file=sys.stderr)"
    )
    result = run(box, source, stdin="40 2\n")
    assert (result.stdout, result.stderr) == ("42\n", "é\n")
    assert run(box, "import sys\nsys.stdout.buffer.write(b'\\xff')").stdout == "\ufffd"


@pytest.mark.parametrize(
    "read",
    ["sys.stdin.read()", "sys.stdin.buffer.read()", "open(0).read()", "open('/dev/stdin').read()"],
)
def test_every_way_to_read_input(box: Sandbox, read: str) -> None:
    text = "x" * 3_000_000  # more than any pipe holds
    assert run(box, f"import sys\nprint(len({read}))", stdin=text).stdout == "3000000\n"


def test_lines_of_bytes_are_read_one_by_one(box: Sandbox) -> None:
    source = "import sys\nread = sys.stdin.buffer.readline\nprint(int(read()), int(read()))"
    assert run(box, source, stdin="1\n2\n").stdout == "1 2\n"


def test_a_traceback_shows_the_program_only(box: Sandbox) -> None:
    assert run(box, "def f():\n    return 1 / 0\nf()").stderr == (
        'Traceback (most recent call last):\n  File "main.py", line 3, in <module>\n    f()\n'
        '  File "main.py", line 2, in f\n    return 1 / 0\n           ~~^~~\nZeroDivisionError: division by zero\n'
    )


def test_a_program_is_main_and_ends_as_one(box: Sandbox) -> None:
    source = """
import atexit, sys, threading, time
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals() and sys.argv == ["main.py"]
atexit.register(print, "goodbye")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("main")
"""
    assert run(box, source).stdout == "main\nthread\ngoodbye\n"


def test_sets_have_one_order(box: Sandbox) -> None:
    source = "print(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert run(box, source).stdout == run(box, source).stdout


def test_files_in_and_out(box: Sandbox) -> None:
    source = "import os\nos.makedirs('out')\nopen('out/sum', 'w').write(str(sum(map(int, open('data/n.txt')))))"
    read = "\nprint(open('out/sum').read())"
    assert run(box, source + read, files={"data/n.txt": b"1\n2\n39\n"}).stdout == "42\n"
    assert run(box, "import os\nprint(os.listdir('.'))").stdout == "[]\n"


def test_time_and_memory_are_measured(box: Sandbox) -> None:
    result = run(
        box,
        "import time\nx = bytearray(50 << 20)\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass",
    )
    assert 0.3 <= result.cpu_s < 1
    assert result.wall_s >= 0.3
    assert 50 < result.memory_mb < 90


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"wall_s": 0}, "wall_s is 0"),
        ({"output_kb": 99999}, "output_kb is 99999, more than file_mb"),
    ],
)
def test_limits_are_checked(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunLimits(**limits)  # type: ignore[arg-type]


def test_a_sandbox_runs_in_several_event_loops_and_restarts_after_close(box: Sandbox) -> None:
    async def many() -> list[str]:
        return [
            result.stdout
            for result in await asyncio.gather(*(box.run(f"print({n})") for n in range(12)))
        ]

    for _ in range(2):
        assert asyncio.run(many()) == [f"{n}\n" for n in range(12)]
    box.close()
    assert asyncio.run(many())[3] == "3\n"


def test_cancelling_kills(box: Sandbox) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(box.run(SLEEPING_PROGRAM.format(name="to-be-cancelled", s=60)))
        await asyncio.to_thread(wait_until, lambda: alive("to-be-cancelled"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    wait_until(lambda: not alive("to-be-cancelled"))
    assert run(box, "print(1)").stdout == "1\n"


def test_a_dead_zygote_is_replaced_and_its_runs_are_repeated() -> None:
    box = started("namespaces")

    async def kill_it() -> str:
        task = asyncio.create_task(box.run(SLEEPING_PROGRAM.format(name="twice-run", s=1)))
        await asyncio.to_thread(wait_until, lambda: alive("twice-run"))
        assert box.pool is not None
        box.pool.zygote.kill()
        return (await task).stdout

    try:
        assert asyncio.run(kill_it()) == "on\n"
        assert box.faults >= 1
    finally:
        box.close()


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_a_jail_ends_if_none_can_be_cloned_in_its_place(tier: str) -> None:
    box = started(tier)
    try:
        assert box.pool is not None
        with box.pool.lend():
            pass  # from now on there are two jails ahead
        lowest_free = os.dup(0)
        os.close(lowest_free)
        files = psutil.Process().num_fds()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            with pytest.raises(SandboxError, match="cannot make another jail") as refusal:
                box.pool.lend().__enter__()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        # The error holds the frame that has the jail, which is closed nevertheless.
        assert refusal.value.__traceback__ is not None
        assert psutil.Process().num_fds() < files
        assert run(box, "print(1)").stdout == "1\n"
        assert psutil.Process().num_fds() == files
    finally:
        box.close()


def test_a_sandbox_that_ends_too_often_is_not_restarted() -> None:
    box = started("namespaces")
    box.restarts = Restarts("sandbox", 1)
    try:
        for _ in range(2):
            assert run(box, "print(1)").stdout == "1\n"
            assert box.pool is not None
            box.pool.zygote.kill()
            box.pool.zygote.wait()
            with pytest.raises(SandboxError, match="it has ended"), box.pool.lend():
                pass
        with pytest.raises(
            SandboxUnavailable, match="zygote has died more than 20 times within an hour"
        ):
            run(box, "print(1)")
    finally:
        box.close()


def test_a_failure_of_the_sandbox_is_an_error_and_not_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    box = started("namespaces")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(box_module, "_CANARY", "")
            patch.setattr(
                jail_module, "asdict", lambda limits: {}
            )  # the warden fails without limits
            with pytest.raises(SandboxError) as failure:
                run(box, "print(1)")
        assert isinstance(failure.value, EnvError)
        assert failure.value.verdict is Verdict.SE
        assert run(box, "print(1)").stdout == "1\n"
    finally:
        box.close()


def test_a_job_that_cannot_be_confined_is_an_error_and_not_a_verdict(box: Sandbox) -> None:
    with pytest.raises(SandboxError, match="the job cannot be confined: OverflowError"):
        run(box, "print(1)", RunLimits(cpu_s=1 << 80))


@pytest.mark.slow
def test_many_runs_survive_their_zygote() -> None:
    box = started("namespaces")

    async def main() -> list[str]:
        tasks = [
            asyncio.create_task(box.run(f"import time\ntime.sleep(0.3)\nprint({n})"))
            for n in range(8)
        ]
        await asyncio.sleep(0.2)
        assert box.pool is not None
        box.pool.zygote.kill()
        return [result.stdout for result in await asyncio.gather(*tasks)]

    try:
        assert asyncio.run(main()) == [f"{n}\n" for n in range(8)]
    finally:
        box.close()


SCRIPT = """
import asyncio, sys
from rollout.sandbox import Sandbox
asyncio.run(Sandbox(tier={tier!r}).run({source!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["namespaces", "landlock", "unisolated"])
def test_programs_die_with_a_killed_host_and_the_next_start_cleans_up(tier: str) -> None:
    started(tier).close()  # skips the test without this tier
    source = SCRIPT.format(
        tier=tier, source=SLEEPING_PROGRAM.format(name=f"orphan-{tier[:4]}", s=60)
    )
    parent = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT)
    try:
        wait_until(lambda: alive(f"orphan-{tier[:4]}"), 30)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not alive(f"orphan-{tier[:4]}"))
    started(tier).close()
    leftovers = [
        *BOXES.glob(f"mcore-sandbox-{parent.pid}-*"),
        *Path("/sys/fs/cgroup").glob(f"**/mcore-sandbox-{parent.pid}-*"),
    ]
    assert leftovers == []


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_nothing_is_left_after_close(tier: str) -> None:
    def leftovers() -> set[object]:
        wardens = set()
        for child in psutil.Process().children():
            with suppress(psutil.ZombieProcess):  # one that another test has ended
                if "guest.warden" in " ".join(child.cmdline()):
                    wardens.add(child)
        return wardens | set(BOXES.glob(f"mcore-sandbox-{os.getpid()}-*"))

    earlier = leftovers()  # of other tests' sandboxes
    box = started(tier)
    run(box, "print(1)")
    assert len(leftovers() - earlier) >= 1
    box.close()
    assert leftovers() <= earlier


def test_a_sandbox_refuses_to_run_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pool: JailPool) -> None:
        pool.close()
        raise SandboxUnavailable("not here")

    monkeypatch.setattr(JailPool, "wait", fail)
    message = (
        "cannot run programs isolated .namespaces: not here; landlock: not here.*tier=unisolated"
    )
    with pytest.raises(SandboxUnavailable, match=message):
        run(Sandbox(), "print(1)")


def test_a_machine_that_cannot_start_a_sandbox_is_not_the_programs_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(wire, "pair", fail)
    with pytest.raises(SandboxUnavailable, match=r"namespaces: .*Too many open files"):
        run(Sandbox(), "print(1)")


@pytest.mark.slow
def test_a_sandbox_runs_unisolated_if_that_tier_is_named() -> None:
    box = Sandbox(tier="unisolated")
    try:
        assert run(box, "print(1)").stdout == "1\n"
        assert box.tier == "unisolated"
        assert run(box, "while True: pass", RunLimits(cpu_s=1)).verdict is Verdict.TLE
    finally:
        box.close()
    with pytest.raises(
        ValueError,
        match="unknown sandbox tier 'jail'; known: auto, namespaces, landlock, unisolated",
    ):
        Sandbox(tier="jail")


def test_a_hole_in_the_isolation_is_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started("landlock").close()
    monkeypatch.setattr(
        box_module.tiers, "ISOLATED", ("unisolated",)
    )  # a tier that claims to isolate and does not
    with pytest.raises(
        SandboxUnavailable, match="its isolation has a hole: the network can be reached"
    ):
        run(Sandbox(tier="unisolated"), "print(1)")


@pytest.mark.skipif(
    not shutil.which("unshare") or not shutil.which("setpriv"), reason="needs util-linux"
)
def test_without_user_namespaces_it_uses_landlock() -> None:
    started("landlock").close()
    inner = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    source = (
        "import asyncio\nfrom rollout.sandbox import Sandbox\nbox = Sandbox()\n"
        "print(asyncio.run(box.run('print(6 * 7)')).stdout, box.tier)\nbox.close()"
    )
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        inner,
        "sh",
        sys.executable,
        "-c",
        source,
    ]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "unshare" in completed.stderr:
        pytest.skip(completed.stderr.strip())
    assert completed.stdout == "42\n landlock\n", completed.stderr


def test_the_terminals_ctrl_c_does_not_reach_programs(box: Sandbox) -> None:
    run(box, "print(1)")
    assert box.pool is not None
    assert os.getpgid(box.pool.zygote.pid) != os.getpgid(0)
