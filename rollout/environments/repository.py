"""Software-repair environment (SWE-bench): an issue, a patch of the files, and hidden tests.

`pack_source`, `pack_check` and `pack_instance` write a task's `answers`; `RepositoryEnv` reads them.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from rollout.base.async_tasks import gather_or_cancel
from rollout.base.errors import EnvError
from rollout.base.yaml_files import read_yaml
from rollout.environments.hidden_verdicts import passed_tests
from rollout.environments.patches import BadPatch, apply_patch, parse_patch
from rollout.environments.protected_files import protect_files
from rollout.environments.protocol import Step, ToolCall
from rollout.environments.running import SandboxedEnv
from rollout.records.trajectory import Task
from rollout.sandbox.judge import CallTest, judge
from rollout.sandbox.records import RunLimits, Verdict

_PATCH_FORM: str = read_yaml(Path(__file__).with_name("forms.yaml"))["patch"]
# Lines that make the modules of the working folder importable.
_IMPORT_FROM_FOLDER = "import os, sys\nsys.path.insert(0, os.getcwd())\n"

# Folders of a checkout that are left out. Files of these names are left out too: in a worktree, `.git`
# is a file.
_SKIPPED_FOLDERS = {".git", "__pycache__", ".tox", "node_modules"}
_MAX_FILE_BYTES = 1 << 20
# Tasks whose tests were seen to fail before the repair, by their answers and the folder of checkouts.
_TASKS_WITH_FAILING_TESTS: set[tuple[str | None, ...]] = set()
# By permission, the words in a checkout's code that show that the code needs it (see `hidden_verdicts`).
_PERMISSION_WORDS = {
    "gc": re.compile(r"\bgc\.get_|\bget_(?:objects|referrers|referents)\b"),
    "trace": re.compile(r"\bset(?:trace|profile)\b|_current_frames|\baddaudithook\b"),
    "ctypes": re.compile(r"\bctypes\b"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCall:
    """Hidden test: `function` of `module` must return `expected`.

    Attributes:
        arguments: JSON values.
        expected: JSON value, which stays outside the sandbox.
        passes_before: True if the test passes before the repair (PASS_TO_PASS).
    """

    name: str
    module: str
    function: str
    arguments: tuple[Any, ...]
    expected: Any
    passes_before: bool


def pack_source(path: str, content: str) -> str:
    """Encode a file that agents see and may change as one of a task's `answers`."""
    return json.dumps({"source": path, "content": content})


def pack_check(check: CheckCall) -> str:
    """Encode a hidden test as one of a task's `answers`; agents are not shown it."""
    values = asdict(check)
    # The packed form has a shorter name for this field.
    values["passes"] = values.pop("passes_before")
    return json.dumps({"check": values})


def _unpack_check(values: Mapping[str, Any]) -> CheckCall:
    """Decode a hidden test that `pack_check` encoded."""
    return CheckCall(
        name=values["name"],
        module=values["module"],
        function=values["function"],
        arguments=tuple(values["arguments"]),
        expected=values["expected"],
        passes_before=values["passes"],
    )


def pack_instance(
    instance: str,
    *,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    test_patch: str,
    shown: Sequence[str] = (),
) -> str:
    """Encode the tests of a SWE-bench instance as one of a task's `answers`.

    The files of the task are those of the instance's checkout.

    Args:
        instance: name of the instance, which is also that of its checkout.
        fail_to_pass: names of tests that the repair must make pass.
        pass_to_pass: names of tests that must still pass.
        test_patch: unified diff that adds the tests.
        shown: paths of the files whose content agents read; of other files they only read the path.
    """
    fields = {
        "instance": instance,
        "shown": list(shown),
        "fail_to_pass": list(fail_to_pass),
        "pass_to_pass": list(pass_to_pass),
        "test_patch": test_patch,
    }
    return json.dumps(fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """Decoded `answers` of a task.

    Attributes:
        sources: content of each file by path.
        shown: paths of the files that agents read.
        checks: hidden tests of a generated task; none for a SWE-bench instance.
        test_patch: diff that adds the pytest tests of a SWE-bench instance; "" for a generated task.
        names_by_kind: names of the checks or pytest tests, by `fail_to_pass` and `pass_to_pass`.
        permissions: permissions that the checkout's code needs (see `_PERMISSION_WORDS`).
    """

    sources: dict[str, str]
    shown: Sequence[str]
    checks: Sequence[CheckCall]
    test_patch: str
    names_by_kind: Mapping[str, Sequence[str]]
    permissions: Collection[str]

    @property
    def test_names(self) -> list[str]:
        """Names of all tests."""
        return list(chain.from_iterable(self.names_by_kind.values()))


@dataclass(eq=False, kw_only=True)
class RepositoryEnv(SandboxedEnv):
    """An issue of a repository, to be resolved by a patch that passes hidden tests.

    Every step is a patch of the original files. The trajectory ends when a patch resolves the
    issue, or after `max_turns` steps. Before the end, an observation says whether the patch applies
    and nothing about the tests. A patch that does not apply, or a text without one, passes no test.
    In a checkout, changes of tests and of pytest's settings are ignored, and expected values of the
    tests stay outside of the sandbox (docs/sandbox.md). Metrics are `solved`, 1 if every test passes,
    as SWE-bench counts; `fail_to_pass` and `pass_to_pass`, shares of tests that pass; `applied`, 1 if
    the patch applies; and `failed_patches`, the number of steps so far whose patch did not.

    Args:
        max_turns: maximum number of steps; each is a patch.
        reward: `all`, 1 if every test passes, else 0; or `rate`, the share of tests that pass.
            Only the last step has a reward.
        checkouts: folder of repositories by instance, for tasks that name an instance.
        cpu_s: CPU seconds that a run of the tests may take; it may take three times as long in wall
            time.
    """

    max_turns: PositiveInt = 1
    reward: Literal["all", "rate"] = "all"
    checkouts: str | None = None
    memory_mb: PositiveInt = 1024
    _answers: _Answers | None = field(default=None, init=False)
    _turns: int = field(default=0, init=False)
    _failed_patches: int = field(default=0, init=False)

    def reset(self, task: Task) -> str:
        """Start a task; return the issue, the files and the form of a patch."""
        self._turns = 0
        self._failed_patches = 0
        self._answers = _read_answers(task, Path(self.checkouts) if self.checkouts else None)
        files = _render_files(self._answers)
        return f"# Issue\n{task.prompt}\n\n# Files\n{files}\n\n# Form of a patch\n{_PATCH_FORM}"

    async def step(self, action: str) -> Step:
        """Apply a patch, and test it."""
        answers = self._answers
        if answers is None:
            raise EnvError("RepositoryEnv.step before reset")
        self._turns += 1

        passed: set[str] = set()
        try:
            files = apply_patch(answers.sources, parse_patch(action))
            passed = await self._run_tests(answers, files)
            applied = True
            observation = "The patch applies."
        except BadPatch as error:
            self._failed_patches += 1
            applied = False
            observation = str(error)

        rates = {kind: _pass_rate(names, passed) for kind, names in answers.names_by_kind.items()}
        solved = all(rate == 1 for rate in rates.values())
        # The tests `fail_to_pass` must fail without the agent's patch. This check runs all tests a second
        # time, so it is made only after a patch has solved the task.
        if solved and answers.test_patch:
            await self._require_failing_tests(answers)
        done = solved or self._turns == self.max_turns
        reward = 0.0
        if done:
            reward = float(solved)
            if self.reward == "rate":
                reward = _pass_rate(answers.test_names, passed)
        return Step(
            observation="" if done else observation,
            reward=reward,
            done=done,
            answer=action.strip() if applied else "",
            tools=(ToolCall(tool="patch", query=action, result=observation, failed=not applied),),
            metrics={
                "solved": float(solved),
                **rates,
                "applied": float(applied),
                "failed_patches": float(self._failed_patches),
            },
        )

    async def _run_tests(self, answers: _Answers, files: Mapping[str, str]) -> set[str]:
        """Return the names of the tests that pass with the patched files.

        Raises:
            BadPatch: the files cannot be written.
            SandboxError: the result of a test is unknown.
        """
        try:
            if answers.test_patch:
                return await self._run_pytest(answers, files)
            return await self._run_checks(answers, files)
        except (OSError, ValueError) as error:
            # A path is impossible, a text is not UTF-8, or the files are too large for the sandbox. Failures
            # of the machine are SandboxErrors.
            raise BadPatch("The patched files cannot be written.") from error

    async def _run_pytest(self, answers: _Answers, files: Mapping[str, str]) -> set[str]:
        """Return the names of the pytest tests that pass.

        Each test file runs in a separate process. Files that the patch must not change are those
        of the checkout.
        """
        test_edits = parse_patch(answers.test_patch)
        modules = sorted({name.split(":", 1)[0] for name in answers.test_names})
        hidden_paths = {*modules, *(edit.path for edit in test_edits)}
        protected = protect_files(answers.sources, files, hidden_paths)
        folder = _encode(apply_patch(protected, test_edits))
        passed = await gather_or_cancel(
            passed_tests(
                self.runner,
                module,
                folder,
                limits=self._test_limits,
                allowed=answers.permissions,
            )
            for module in modules
            if module in folder
        )
        return set().union(*passed)

    async def _require_failing_tests(self, answers: _Answers) -> None:
        """Raise EnvError if a test that the repair must make pass has passed before it.

        Such a test says nothing about a repair. Each task is checked once.
        """
        key = (*self.task.answers, self.checkouts)
        if key in _TASKS_WITH_FAILING_TESTS:
            return
        passed = await self._run_pytest(answers, answers.sources)
        for name in answers.names_by_kind["fail_to_pass"]:
            if name in passed:
                raise EnvError(
                    f"task {self.task.id}: the test {name} passes without a repair in this "
                    "environment; remove the task, or install the versions that it needs"
                )
        _TASKS_WITH_FAILING_TESTS.add(key)

    async def _run_checks(self, answers: _Answers, files: Mapping[str, str]) -> set[str]:
        """Return the names of the checks that pass."""
        folder = _encode(files)
        results = await gather_or_cancel(
            judge(
                self.runner,
                f"{_IMPORT_FROM_FOLDER}from {check.module} import {check.function}\n",
                CallTest(
                    function=check.function, arguments=check.arguments, accepted=(check.expected,)
                ),
                limits=self._test_limits,
                files=folder,
            )
            for check in answers.checks
        )
        return {
            check.name
            for check, result in zip(answers.checks, results, strict=True)
            if result.verdict is Verdict.OK
        }

    @property
    def _test_limits(self) -> RunLimits:
        return replace(self.limits, wall_s=3.0 * self.cpu_s, disk_mb=512, files=50_000)


def _render_files(answers: _Answers) -> str:
    """Return the files for the prompt: first the paths of those not shown, then path and content of the rest."""
    paths = sorted(path for path in answers.sources if path not in answers.shown)
    parts = ["\n".join(paths)] if paths else []
    for path in answers.shown:
        if path in answers.sources:
            parts.append(f"## {path}\n```\n{answers.sources[path]}```")
    return "\n\n".join(parts)


def _encode(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: content.encode() for path, content in files.items()}


def _pass_rate(names: Sequence[str], passed: Collection[str]) -> float:
    """Return the share of tests that pass; 1 without tests."""
    if not names:
        return 1.0
    return sum(name in passed for name in names) / len(names)


def _read_answers(task: Task, checkouts: Path | None) -> _Answers:
    """Decode the answers of a task.

    Raises:
        EnvError: they cannot be decoded, a checkout is missing, the patch of the tests does not fit
            it, or there is no file or no test that fails before the repair.
    """
    sources: dict[str, str] = {}
    checks: list[CheckCall] = []
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    shown: list[str] | None = None
    test_patch = ""
    try:
        for text in task.answers:
            fields = json.loads(text)
            if "source" in fields:
                sources[fields["source"]] = fields["content"]
            elif "check" in fields:
                check = _unpack_check(fields["check"])
                checks.append(check)
                names = pass_to_pass if check.passes_before else fail_to_pass
                names.append(check.name)
            else:
                sources |= _read_checkout(checkouts, fields["instance"])
                fail_to_pass += fields["fail_to_pass"]
                pass_to_pass += fields["pass_to_pass"]
                shown = fields["shown"]
                test_patch = fields["test_patch"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvError(
            f"task {task.id}: its answers are not files and tests ({type(error).__name__}: {error})"
        ) from error
    if not sources or not fail_to_pass:
        raise EnvError(f"task {task.id} has no files or no test that fails; a repair needs both")
    if test_patch:
        _require_applicable_patch(task, sources, test_patch)
    return _Answers(
        sources=sources,
        shown=sorted(sources) if shown is None else shown,
        checks=checks,
        test_patch=test_patch,
        names_by_kind={"fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass},
        permissions=_find_permissions(sources) if test_patch else (),
    )


def _require_applicable_patch(task: Task, sources: Mapping[str, str], test_patch: str) -> None:
    """Raise EnvError if the patch that adds the tests does not fit the checkout.

    Otherwise every patch of an agent would fail, for a reason that is none of its mistakes.
    """
    try:
        apply_patch(sources, parse_patch(test_patch))
    except BadPatch as error:
        raise EnvError(
            f"task {task.id}: the patch of its tests does not fit the checkout ({error}); "
            "check out the commit that the task names, or remove the task"
        ) from error


def _find_permissions(sources: Mapping[str, str]) -> set[str]:
    """Return the permissions whose words are in the code of a checkout."""
    permissions = set()
    for path, content in sources.items():
        if path.endswith(".py"):
            for permission, words in _PERMISSION_WORDS.items():
                if permission not in permissions and words.search(content):
                    permissions.add(permission)
    return permissions


def _read_checkout(checkouts: Path | None, instance: str) -> dict[str, str]:
    """Return the text files of an instance's repository by path.

    Links, files of more than _MAX_FILE_BYTES and the content of _SKIPPED_FOLDERS are left out.

    Raises:
        EnvError: `checkouts` is not set, or has no folder of the instance.
    """
    root = checkouts / instance if checkouts is not None else None
    if root is None or not root.is_dir():
        raise EnvError(
            f"{root or instance}: no such checkout; "
            "set env.options.checkouts to a folder that has it"
        )
    files = {}
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if not path.is_file() or path.is_symlink() or not _SKIPPED_FOLDERS.isdisjoint(parts):
            continue
        if path.stat().st_size <= _MAX_FILE_BYTES:
            with suppress(UnicodeDecodeError):  # files that are not text are left out
                # Path.read_text would change line ends.
                files["/".join(parts)] = path.read_bytes().decode("utf-8")
    return files
