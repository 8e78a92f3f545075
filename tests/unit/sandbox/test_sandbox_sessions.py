"""Sessions of cells that share variables and files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollout.sandbox import RunLimits, Sandbox, Session, Verdict
from rollout.sandbox import session as sandbox_session

LIMITS = RunLimits(wall_s=10, memory_mb=256, disk_mb=8, file_mb=4)


def use(box: Sandbox, cells: Callable[[Session], Awaitable[None]]) -> None:
    """Run cells in a new session."""

    async def main() -> None:
        async with box.session(LIMITS) as session:
            await cells(session)

    asyncio.run(main())


def test_variables_stay_and_last_values_are_printed(box: Sandbox) -> None:
    async def cells(session: Session) -> None:
        first = await session.run("x = 40\nprint('set')")
        assert (first.stdout, first.fresh) == ("set\n", True)
        second = await session.run("def plus(n):\n    return x + n\nplus(2)")
        assert (second.stdout, second.fresh) == ("42\n", False)
        assert (await session.run("None")).stdout == ""

    use(box, cells)


def test_an_exception_keeps_the_variables(box: Sandbox) -> None:
    async def cells(session: Session) -> None:
        await session.run("x = 1")
        failed = await session.run("x = 2\n1 / 0")
        assert (failed.verdict, failed.exit_code) == (Verdict.RE, 1)
        assert failed.stderr.startswith(
            'Traceback (most recent call last):\n  File "cell 2", line 2, in <module>\n    1 / 0'
        )
        assert (await session.run("def")).stderr.endswith("SyntaxError: invalid syntax\n")
        assert (await session.run("bytearray(1 << 40)")).verdict is Verdict.MLE
        assert (await session.run("raise SystemExit(0)")).verdict is Verdict.OK
        assert (await session.run("x")).stdout == "2\n"

    use(box, cells)


SPIN = """
import ctypes, threading, time
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("rest", ctypes.c_int * 13)]
timer, libc = ctypes.c_int(), ctypes.CDLL(None, use_errno=True)
# timer_create with SIGCONT, which would wake a stopped process
made = libc.syscall(222, 0, ctypes.byref(Event(signal=18)), ctypes.byref(timer))
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
spent = time.process_time()
made
"""


def test_threads_of_a_cell_are_paused_until_the_next_cell(box: Sandbox) -> None:
    """Otherwise an endless thread would occupy a core for the rest of its trajectory."""

    async def cells(session: Session) -> None:
        assert (await session.run(SPIN)).stdout == "-1\n"
        await asyncio.sleep(2)
        assert (await session.run("time.process_time() - spent < 0.5")).stdout == "True\n"
        assert (
            await session.run("threading.active_count()")
        ).stdout == "2\n"  # the thread is still there

    use(box, cells)


def test_a_cell_out_of_time_is_interrupted(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cell waits until the process has started, which may take long on a busy machine.

    The process also gets more time to react to the interrupt: if it were killed instead, `n` would
    be lost.
    """
    monkeypatch.setattr(sandbox_session, "_INTERRUPT_S", 60.0)

    async def cells(session: Session) -> None:
        assert (await session.run("n = 0")).verdict is Verdict.OK
        late = await session.run("while True: n += 1", wall_s=0.5)
        assert (late.verdict, late.exit_code) == (Verdict.TLE, 1)
        assert 0.5 <= late.wall_s < LIMITS.wall_s
        after = await session.run("n > 0")
        assert (after.stdout, after.fresh) == ("True\n", False)

    use(box, cells)


def test_a_cell_that_ignores_the_interrupt_is_killed_and_files_stay(box: Sandbox) -> None:
    async def cells(session: Session) -> None:
        stubborn = """
import signal
open("kept", "w").write("1")
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    pass
"""
        late = await session.run(stubborn, wall_s=1.5)
        assert (late.verdict, late.exit_code) == (Verdict.TLE, -9)
        after = await session.run("open('kept').read()")
        assert (after.stdout, after.fresh) == ("'1'\n", True)
        assert (await session.run("'stubborn' in dir()")).fresh is False

    use(box, cells)


@pytest.mark.parametrize(
    ("source", "code"), [("import os\nos._exit(3)", 3), ("import os\nos.abort()", -6)]
)
def test_a_process_that_ends_is_replaced(box: Sandbox, source: str, code: int) -> None:
    async def cells(session: Session) -> None:
        await session.run("x = 1")
        ended = await session.run(source)
        assert (ended.verdict, ended.exit_code) == (Verdict.RE, code)
        again = await session.run("x")
        assert again.fresh
        assert again.stderr.endswith("NameError: name 'x' is not defined\n")

    use(box, cells)


def test_files_go_in_and_out(box: Sandbox) -> None:
    async def cells(session: Session) -> None:
        await session.put("data/train.csv", b"a,b\n1,2\n")
        assert (await session.run("open('data/train.csv').read()")).stdout == "'a,b\\n1,2\\n'\n"
        await session.run(
            "import os\nos.symlink('/etc/passwd', 'link')\nos.mkdir('d')\nopen('d/out', 'wb').write(b'x' * 10)"
        )
        assert await session.files() == {"data/train.csv": 8, "d/out": 10}
        assert await session.get("d/out") == b"x" * 10
        assert await session.get("link") is None
        assert await session.get("d") is None
        await session.put("d/out", b"new")
        assert await session.get("d/out") == b"new"
        with pytest.raises(ValueError, match="no path in a box"):
            await session.get("../etc/passwd")
        with pytest.raises(OSError, match=r"cannot write .* into the box"):
            await session.put("link/x", b"")

    use(box, cells)


def test_calls_of_one_session_take_turns(box: Sandbox) -> None:
    async def cells(session: Session) -> None:
        await asyncio.gather(
            *(session.put(f"f{n}", b"x" * n) for n in range(5)), session.run("import os")
        )
        results = await asyncio.gather(
            session.run("len(os.listdir('.'))"), *(session.get(f"f{n}") for n in range(5))
        )
        assert (results[0].stdout, results[1:]) == ("5\n", [b"x" * n for n in range(5)])

    use(box, cells)


def test_a_folder_that_became_a_link_is_not_followed(box: Sandbox) -> None:
    async def cells(session: Session) -> None:
        await session.put("d/x", b"1")
        await session.run("import os, shutil\nshutil.rmtree('d')\nos.symlink('/tmp', 'd')")
        with pytest.raises(OSError, match=r"cannot write .* into the box"):
            await session.put("d/x", b"2")
        assert await session.get("d/x") is None

    use(box, cells)


def test_a_file_that_does_not_fit_is_refused(spacious: Sandbox) -> None:
    async def cells(session: Session) -> None:
        with pytest.raises(OSError, match="No space left"):
            await session.put("large", b"x" * (9 << 20))

    use(spacious, cells)


def test_endless_output_of_a_cell(box: Sandbox) -> None:
    async def cells(session: Session) -> None:
        flood = await session.run("while True: print('x' * 1000)")
        assert flood.verdict is Verdict.OLE
        assert len(flood.stdout) == LIMITS.output_kb << 10

    use(box, cells)


def test_a_cancelled_cell_ends_its_process(box: Sandbox) -> None:
    async def cells(session: Session) -> None:
        await session.run("x = 1")
        task = asyncio.create_task(session.run("import time\ntime.sleep(60)"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await session.run("'x' in dir()")
        assert (again.stdout, again.fresh) == ("False\n", True)

    use(box, cells)


def test_sessions_are_separate_and_share_the_slots(box: Sandbox) -> None:
    async def main() -> list[str]:
        async def one(n: int) -> str:
            async with box.session(LIMITS) as session:
                await session.run(f"x = {n}")
                await asyncio.sleep(0.05)
                return (await session.run("x")).stdout

        return await asyncio.gather(*(one(n) for n in range(6)))  # more than there are slots

    assert asyncio.run(main()) == [f"{n}\n" for n in range(6)]
