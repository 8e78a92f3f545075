"""Software-repair tasks, generated: packages with one bug each, what a user says of it, and hidden tests."""

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
from rollout.tasks.repository_functions import BUGGY_FUNCTIONS, BuggyFunction
from rollout.tasks.splits import digest, draw_different, split_of

_PACKAGES = ("toolbox", "pantry", "drawer", "shelf", "crate", "basket", "locker", "chest")
_MODULES = ("core", "basics", "lists", "extra", "shapes", "more")
_EACH = 3  # hidden tests that fail, and that pass, of the function with the bug
_OTHERS = 2  # of every other function
_PATIENCE = 2000  # draws of arguments


def repository_tasks(
    seed: int,
    sizes: Mapping[str, int],
    *,
    modules: Annotated[int, Field(ge=1, le=len(BUGGY_FUNCTIONS) // 2)] = 2,
) -> list[Task]:
    """sizes[split] packages for each split; a bug of a function belongs to one split whatever the seed.

    Args:
        modules: of a package, each with two functions.
    """
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, "repositories", split))
        own = [
            (f, bug)
            for f in BUGGY_FUNCTIONS
            for bug in f.bugs
            if split_of(f"{f.right.__name__}/{bug}") == split
        ]
        draw = partial(_draw, random, own, split, modules)
        tasks += draw_different("repositories", split, size, draw)
    return tasks


def _draw(
    random: Random, own: Sequence[tuple[BuggyFunction, str]], split: str, modules: int
) -> Task:
    family, bug = random.choice(own)
    others = random.sample(
        [other for other in BUGGY_FUNCTIONS if other is not family], 2 * modules - 1
    )
    functions = random.sample([family, *others], 2 * modules)
    package, names = random.choice(_PACKAGES), random.sample(_MODULES, modules)
    wrong, complaint = family.bugs[bug]
    files, checks = {f"{package}/__init__.py": f'"""The package {package}."""\n'}, []
    place = ""
    for number, name in enumerate(names):
        inside = functions[2 * number : 2 * number + 2]
        sources = [source_of(wrong if f is family else f.right, f.right) for f in inside]
        files[f"{package}/{name}.py"] = f'"""Functions of {package}."""\n\n\n' + "\n\n".join(
            sources
        )
        place = f"{package}.{name}" if family in inside else place
        for f in inside:
            checks += _checks(random, f, f"{package}.{name}", wrong if f is family else None)
    failing = next(check for check in checks if not check.passes)
    shown = ", ".join(json.dumps(argument) for argument in failing.arguments)
    function = family.right.__name__
    prompt = (
        f"`{place}.{function}` does not do what it says. {complaint} For example `{function}({shown})` should be "
        f"`{json.dumps(failing.expected)}`."
    )
    answers = [pack_source(path, content) for path, content in files.items()] + [
        pack_check(check) for check in checks
    ]
    id, source = f"repositories/{digest(*answers)}", "repositories"
    return Task(
        id=id, prompt=prompt, answers=tuple(answers), env="repository", source=source, split=split
    )


def source_of(function: Callable[..., Any], right: Callable[..., Any]) -> str:
    """The text of a function as agents read it: under the name and with the docstring of the right one."""
    text, own = (
        inspect.getsource(one).split("\n", 1)[1] for one in (function, right)
    )  # without the decorator
    head, body = text.replace(f"def {function.__name__}(", f"def {right.__name__}(", 1).split(
        "\n", 1
    )
    docstring = "" if function is right else own.split("\n")[1] + "\n"
    return f"{head}\n{docstring}{body}"


def _checks(
    random: Random, family: BuggyFunction, module: str, wrong: Callable[..., Any] | None
) -> list[CheckCall]:
    """Calls of a function, and whether a bug in it is without effect on them."""
    wanted = {True: _OTHERS} if wrong is None else {True: _EACH, False: _EACH}
    seen: set[str] = set()
    checks: list[CheckCall] = []
    for _ in range(_PATIENCE):
        arguments = family.draw(random)
        expected = family.right(*arguments)
        passes = wrong is None or wrong(*arguments) == expected
        text = json.dumps(arguments)
        if text in seen or not wanted.get(passes):
            continue
        seen.add(text)
        wanted[passes] -= 1
        name = family.right.__name__
        label = f"{module}.{name}-{len(checks)}"
        checks.append(
            CheckCall(
                name=label,
                module=module,
                function=name,
                arguments=arguments,
                expected=expected,
                passes=passes,
            )
        )
        if not any(wanted.values()):
            return checks
    raise AssertionError(f"{family.right.__name__}: no arguments for {wanted}")
