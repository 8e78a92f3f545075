"""Software-repair environment (SWE-bench): an issue with its files, a patch for them, and hidden tests."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any, Literal

from pydantic import PositiveInt

from rollout.base.async_tasks import gather_or_cancel
from rollout.base.errors import EnvError
from rollout.base.yaml_files import read_yaml
from rollout.environments.patches import BadPatch, apply_patch, parse_patch
from rollout.environments.protocol import Step, ToolCall
from rollout.environments.running import SandboxedEnv
from rollout.records.trajectory import Task
from rollout.sandbox.judge import CallTest, judge
from rollout.sandbox.records import Verdict

_FORM: str = read_yaml(Path(__file__).with_name("forms.yaml"))["patch"]
_HERE = "import os, sys\nsys.path.insert(0, os.getcwd())\n"
_PYTEST = """
import os, sys
sys.path[:] = [path for path in sys.path if path != os.getcwd()]
import pytest  # not one that a patch brings
sys.path.insert(0, os.getcwd())


def main():
    mark, *modules = sys.stdin.read().split()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # else the mark could be read again
    passed = []

    class Passed:
        def pytest_runtest_logreport(self, report):
            if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
                passed.append(report.nodeid)

    options = ["-q", "--tb=no", "--show-capture=no", "--rootdir=.", "-p", "no:cacheprovider"]
    pytest.main([*options, *modules], plugins=[Passed()])
    print("", *(f"{mark} {name}" for name in passed), sep="\\n", flush=True)
    os._exit(0)  # what the tested code has put off to its end could print, too


main()
"""
# what pytest is configured by: a patch's changes of these do not count
_CONFIGURES = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")
_SKIPPED = (".git", "__pycache__", ".tox", "node_modules")
_MAX_FILE = 1 << 20  # bytes of a checkout's files that are read


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCall:
    """A hidden test: `function` of `module` is to return `expected`."""

    name: str
    module: str
    function: str
    arguments: tuple[Any, ...]  # JSON values
    expected: Any  # JSON value; stays outside the sandbox
    passes: bool  # before the repair: a PASS_TO_PASS test


def pack_source(path: str, content: str) -> str:
    """A file that agents see and may change, as one of a task's `answers`."""
    return json.dumps({"source": path, "content": content})


def pack_check(check: CheckCall) -> str:
    """A hidden test, as one of a task's `answers`; no model ever sees it."""
    return json.dumps({"check": asdict(check)})


def pack_instance(
    instance: str,
    *,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    test_patch: str,
    shown: Sequence[str] = (),
) -> str:
    """What a row of SWE-bench says of its tests, as one of a task's `answers`; the files are a checkout's.

    Args:
        shown: paths of the files that agents read; of others they read the names.
    """
    tests = {
        "fail_to_pass": list(fail_to_pass),
        "pass_to_pass": list(pass_to_pass),
        "test_patch": test_patch,
    }
    return json.dumps({"instance": instance, "shown": list(shown), **tests})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instance:
    sources: dict[str, str]
    shown: Sequence[str]
    checks: Sequence[CheckCall]
    tests: Mapping[str, Sequence[str]]  # names of `fail_to_pass` and `pass_to_pass`
    test_patch: str


@dataclass(eq=False, kw_only=True)
class RepositoryEnv(SandboxedEnv):
    """An issue of a repository, resolved by patches that hidden tests decide on.

    Every step is a patch of the files as they were. It ends when the patch resolves the issue, or with the
    `max_turns`th; before that, an observation says whether it applies and nothing about the tests. A patch that does
    not apply, or a text without one, passes no test. Of a checkout, what a patch changes of pytest's configuration
    (conftest.py, pyproject.toml and the like) does not count, nor does what the tested code prints. Metrics: `solved`,
    1 when every test passes, as SWE-bench counts; `fail_to_pass` and `pass_to_pass`, shares that pass; `applied`;
    `malformed_patches` so far.

    Args:
        max_turns: patches at most.
        reward: `all`, 1 when every test passes, else 0; or `rate`, the share that does. Only the last step is paid.
        checkouts: folder of repositories by instance, for tasks that name one.
        cpu_s: CPU seconds of a run; on the clock it has three times as many.
    """

    max_turns: PositiveInt = 1
    reward: Literal["all", "rate"] = "all"
    checkouts: str | None = None
    memory_mb: PositiveInt = 1024
    _instance: _Instance | None = field(default=None, init=False)
    _turns: int = field(default=0, init=False)
    _malformed: int = field(default=0, init=False)

    def reset(self, task: Task) -> str:
        """Start `task`; returns the issue, the files and the form of a patch."""
        self._turns = self._malformed = 0
        self._instance = _read(task, Path(self.checkouts) if self.checkouts else None)
        sources = self._instance.sources
        named = "\n".join(sorted(path for path in sources if path not in self._instance.shown))
        shown = [
            f"## {path}\n```\n{sources[path]}```"
            for path in self._instance.shown
            if path in sources
        ]
        listed = "\n\n".join([*([named] if named else []), *shown])
        return f"# Issue\n{task.prompt}\n\n# Files\n{listed}\n\n# Form of a patch\n{_FORM}"

    async def step(self, action: str) -> Step:
        """Apply a patch, and test it."""
        instance = self._instance
        if instance is None:
            raise EnvError("RepositoryEnv.step before reset")
        self._turns += 1
        passed: dict[str, bool] = {}
        try:
            files = apply_patch(instance.sources, parse_patch(action))
            passed = await self._test(instance, files)
            observation, applied = "The patch applies.", True
        except BadPatch as error:
            self._malformed += 1
            observation, applied = str(error), False
        rates = {kind: _share(names, passed) for kind, names in instance.tests.items()}
        solved = all(rate == 1 for rate in rates.values())
        done = solved or self._turns == self.max_turns
        paid = (
            float(solved)
            if self.reward == "all"
            else _share([*chain(*instance.tests.values())], passed)
        )
        counts = {"applied": float(applied), "malformed_patches": float(self._malformed)}
        return Step(
            observation=observation if not done else "",
            reward=paid if done else 0.0,
            done=done,
            answer=action.strip() if applied else "",
            tools=(ToolCall(tool="patch", query=action, result=observation, failed=not applied),),
            metrics={"solved": float(solved), **rates, **counts},
        )

    async def _test(self, instance: _Instance, files: Mapping[str, str]) -> dict[str, bool]:
        """Which tests pass, by name; SandboxError where nothing is known about one of them."""
        limits = replace(self.limits, wall_s=3.0 * self.cpu_s, disk_mb=512, files=50_000)
        if instance.test_patch:
            own = {path: content for path, content in instance.sources.items() if _configures(path)}
            try:
                files = {
                    path: content for path, content in files.items() if not _configures(path)
                } | own
                files = apply_patch(files, parse_patch(instance.test_patch))
            except BadPatch:  # the agent has changed what the tests change
                return {}
        folder = {path: content.encode() for path, content in files.items()}
        try:
            if instance.test_patch:
                modules = " ".join(
                    sorted({name.split(":", 1)[0] for name in chain(*instance.tests.values())})
                )
                mark = token_hex()  # unknown to what the tested code prints
                result = await self.runner.run(
                    _PYTEST, stdin=f"{mark} {modules}", limits=limits, files=folder
                )
                return dict.fromkeys(
                    re.findall(rf"^{mark} (\S+)", result.stdout, re.MULTILINE), True
                )
            judged = await gather_or_cancel(
                judge(self.runner, *_as_call(check), limits=limits, files=folder)
                for check in instance.checks
            )
        except (OSError, ValueError) as error:  # a file where a folder is, or a name that is none
            raise BadPatch("The patched files cannot be written.") from error
        return {
            c.name: j.verdict is Verdict.OK for c, j in zip(instance.checks, judged, strict=True)
        }


def _configures(path: str) -> bool:
    return PurePosixPath(path).name in _CONFIGURES


def _as_call(check: CheckCall) -> tuple[str, CallTest]:
    source = f"{_HERE}from {check.module} import {check.function}\n"
    return source, CallTest(
        function=check.function, arguments=check.arguments, accepted=(check.expected,)
    )


def _share(names: Sequence[str], passed: Mapping[str, bool]) -> float:
    return sum(passed.get(name, False) for name in names) / len(names) if names else 1.0


def _read(task: Task, checkouts: Path | None) -> _Instance:
    sources: dict[str, str] = {}
    checks: list[CheckCall] = []
    tests: dict[str, list[str]] = {"fail_to_pass": [], "pass_to_pass": []}
    shown, test_patch = None, ""
    try:
        for text in task.answers:
            fields = json.loads(text)
            if "source" in fields:
                sources[fields["source"]] = fields["content"]
            elif "check" in fields:
                check = fields["check"]
                checks.append(CheckCall(**{**check, "arguments": tuple(check["arguments"])}))
                tests["pass_to_pass" if checks[-1].passes else "fail_to_pass"].append(
                    checks[-1].name
                )
            else:
                sources |= _checkout(checkouts, fields["instance"])
                tests = {kind: [*names, *fields[kind]] for kind, names in tests.items()}
                shown, test_patch = fields["shown"], fields["test_patch"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvError(
            f"task {task.id}: its answers are no files and tests ({type(error).__name__}: {error})"
        ) from error
    if not sources or not tests["fail_to_pass"]:
        raise EnvError(f"task {task.id} has no files or no test that fails; a repair needs both")
    shown = sorted(sources) if shown is None else shown
    return _Instance(
        sources=sources, shown=shown, checks=checks, tests=tests, test_patch=test_patch
    )


def _checkout(checkouts: Path | None, instance: str) -> dict[str, str]:
    """The text files of a repository at the commit of an instance."""
    root = checkouts / instance if checkouts is not None else None
    if root is None or not root.is_dir():
        raise EnvError(
            f"{root or instance}: no such checkout; set env.options.checkouts to a folder that has it"
        )
    files = {}
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        small = path.is_file() and not path.is_symlink() and path.stat().st_size <= _MAX_FILE
        if small and not set(parts) & set(_SKIPPED):
            with suppress(UnicodeDecodeError):
                files["/".join(parts)] = path.read_text(encoding="utf-8")
    return files
