"""Software repair tasks, generated: packages with one bug, a user's complaint, and hidden tests."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Annotated, Any

from pydantic import Field

from rollout.environments.repository import CheckCall, pack_check, pack_source
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Task
from rollout.tasks.repository_functions import FUNCTIONS_WITH_BUGS, FunctionBug, FunctionWithBugs
from rollout.tasks.splits import content_digest, draw_different, split_of

_PACKAGE_NAMES = ("toolbox", "pantry", "drawer", "shelf", "crate", "basket", "locker", "chest")
_MODULE_NAMES = ("core", "basics", "lists", "extra", "shapes", "more")

_FUNCTIONS_PER_MODULE = 2

# Hidden tests of the function with the bug: so many fail, and so many pass.
_CHECKS_OF_BUG = 3
# Hidden tests of every other function.
_CHECKS_OF_OTHERS = 2

# Draws of arguments before a function is considered to have too few.
_MAX_DRAWS = 2000


def repository_tasks(
    seed: int,
    sizes: Mapping[str, int],
    *,
    modules: Annotated[int, Field(ge=1, le=len(FUNCTIONS_WITH_BUGS) // 2)] = 2,
) -> list[Task]:
    """Draw sizes[split] packages for each split; a bug belongs to one split for every seed.

    Args:
        seed: seed of the run.
        sizes: number of tasks by split.
        modules: number of modules of a package, each with two functions.
    """
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, "repositories", split))
        bugs = []
        for family in FUNCTIONS_WITH_BUGS:
            for name in family.bugs:
                if split_of(f"{family.correct.__name__}/{name}") == split:
                    bugs.append((family, name))
        draw = partial(_draw_task, random, bugs, split, modules)
        tasks += draw_different("repositories", split, size, draw)
    return tasks


def _draw_task(
    random: Random, bugs: Sequence[tuple[FunctionWithBugs, str]], split: str, modules: int
) -> Task:
    """Draw a task: a package with one bug, to be repaired.

    Args:
        random: random number generator.
        bugs: functions and names of their bugs to choose from.
        split: split of the task.
        modules: number of modules.
    """
    family, bug_name = random.choice(bugs)
    bug = family.bugs[bug_name]
    functions = modules * _FUNCTIONS_PER_MODULE
    other_families = [other for other in FUNCTIONS_WITH_BUGS if other is not family]
    others = random.sample(other_families, functions - 1)
    families = random.sample([family, *others], functions)
    package = random.choice(_PACKAGE_NAMES)
    module_names = random.sample(_MODULE_NAMES, modules)

    files = {f"{package}/__init__.py": f'"""The package {package}."""\n'}
    checks: list[CheckCall] = []
    buggy_module = ""
    for number, name in enumerate(module_names):
        start = number * _FUNCTIONS_PER_MODULE
        members = families[start : start + _FUNCTIONS_PER_MODULE]
        sources = []
        for member in members:
            function = bug.function if member is family else member.correct
            sources.append(source_of(function, member.correct))
        functions_text = "\n\n".join(sources)
        files[f"{package}/{name}.py"] = f'"""Functions of {package}."""\n\n\n{functions_text}'
        module = f"{package}.{name}"
        if family in members:
            buggy_module = module
        for member in members:
            checks += draw_checks(random, member, module, bug if member is family else None)

    answers = [pack_source(path, content) for path, content in files.items()]
    answers += [pack_check(check) for check in checks]
    return Task(
        id=f"repositories/{content_digest(*answers)}",
        prompt=_complaint(family, bug, buggy_module, checks),
        answers=tuple(answers),
        env="repository",
        source="repositories",
        split=split,
    )


def _complaint(
    family: FunctionWithBugs, bug: FunctionBug, module: str, checks: Sequence[CheckCall]
) -> str:
    """Return what a user writes about a bug, with the first test that fails as an example."""
    failing = next(check for check in checks if not check.passes_before)
    arguments = ", ".join(json.dumps(argument) for argument in failing.arguments)
    function = family.correct.__name__
    return (
        f"`{module}.{function}` does not do what it says. {bug.complaint} For example "
        f"`{function}({arguments})` should be `{json.dumps(failing.expected)}`."
    )


def source_of(function: Callable[..., Any], correct: Callable[..., Any]) -> str:
    """Return the source of a function under the name and docstring of the correct one."""
    source = _source_without_decorator(function)
    renamed = source.replace(f"def {function.__name__}(", f"def {correct.__name__}(", 1)
    signature, body = renamed.split("\n", 1)
    if function is correct:
        return f"{signature}\n{body}"
    docstring = _source_without_decorator(correct).split("\n")[1]
    return f"{signature}\n{docstring}\n{body}"


def _source_without_decorator(function: Callable[..., Any]) -> str:
    return inspect.getsource(function).split("\n", 1)[1]


def draw_checks(
    random: Random, family: FunctionWithBugs, module: str, bug: FunctionBug | None
) -> list[CheckCall]:
    """Draw hidden tests of a function.

    Args:
        random: random numbers.
        family: the function and its variants.
        module: module of the function in the package.
        bug: bug in the function, because of which half of the tests fail; None: no bug.
    """
    missing = {True: _CHECKS_OF_OTHERS}  # number of tests by their result before the repair
    if bug is not None:
        missing = {True: _CHECKS_OF_BUG, False: _CHECKS_OF_BUG}
    name = family.correct.__name__
    seen: set[str] = set()
    checks: list[CheckCall] = []
    for _ in range(_MAX_DRAWS):
        arguments = family.draw_arguments(random)
        expected = family.correct(*arguments)
        passes_before = bug is None or bug.function(*arguments) == expected
        text = json.dumps(arguments)
        if text in seen or not missing.get(passes_before):
            continue
        seen.add(text)
        missing[passes_before] -= 1
        checks.append(
            CheckCall(
                name=f"{module}.{name}-{len(checks)}",
                module=module,
                function=name,
                arguments=arguments,
                expected=expected,
                passes_before=passes_before,
            )
        )
        if not any(missing.values()):
            return checks
    raise AssertionError(f"{name}: no arguments for {missing}")
