"""Checks that a user's function or object can be called as a run calls it, before anything starts."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollout.base.errors import OptionsError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_call(
    name: str,
    target: Any,
    arguments: Sequence[str],
    *,
    keywords: Sequence[str] | None = None,
    coroutine: bool = False,
    generator: bool = False,
) -> None:
    """Refuse a target that cannot be called with these arguments.

    Args:
        name: the target, as errors name it.
        arguments: names of the positional arguments.
        keywords: names of the keyword arguments; None: the target's keyword-only parameters are
            options, and are not checked.
        coroutine: True if the target must be an async function.
        generator: True if the target may be a generator function.

    Raises:
        OptionsError: the target is not callable, does not take the arguments, is async although it
            may not be or not although it must be, or is a generator although it may not be.
    """
    expected = f"{name} must take ({', '.join(_parameter_names(arguments, keywords))})"
    if not callable(target):
        raise OptionsError(f"{expected}; it is of type {type(target).__name__}")
    if not _can_bind(target, arguments, keywords):
        raise OptionsError(f"{expected}, not {_signature_text(target)}")

    function = called_function(target)
    if inspect.iscoroutinefunction(function) != coroutine:
        raise OptionsError(
            f"{expected} {'as an async function' if coroutine else 'and may not be async'}"
        )
    if inspect.isgeneratorfunction(function) and not generator:
        raise OptionsError(f"{expected} and may not yield")


def check_methods(name: str, target: Any, methods: Mapping[str, Sequence[str]]) -> None:
    """Refuse a class or an object without these methods.

    Args:
        name: the target, as errors name it.
        target: a class or an object; one that defines `__getattr__` may have any method.
        methods: names of the positional arguments by name of the method, such as "step"; "async step"
            if the method must be async.

    Raises:
        OptionsError: a method is missing, or cannot be called with its arguments.
    """
    if hasattr(target, "__getattr__"):
        return
    for declaration, arguments in methods.items():
        method_name = declaration.removeprefix("async ")
        method = getattr(target, method_name, None)
        if method is None or getattr(method, "__isabstractmethod__", False):
            expected = " and ".join(
                f"{declared}({', '.join(names)})" for declared, names in methods.items()
            )
            raise OptionsError(f"{name} lacks a method {method_name}; expected {expected}")
        if isinstance(target, type) and inspect.isfunction(
            inspect.getattr_static(target, method_name)
        ):
            method = partial(method, None)  # binds `self`
        check_call(
            f"{name}: its method {method_name}",
            method,
            arguments,
            keywords=(),
            coroutine=declaration.startswith("async "),
        )


def called_function(target: Callable[..., Any]) -> Any:
    """Return the function that runs when a target is called.

    It is the `__init__` of a class, the function of a partial, and the `__call__` of another object.
    """
    target = inspect.unwrap(target)
    if isinstance(target, type):
        return target.__init__  # type: ignore[misc]
    if isinstance(target, partial):
        return called_function(target.func)
    return target if inspect.isroutine(target) else type(target).__call__


def _can_bind(
    target: Callable[..., Any], arguments: Sequence[str], keywords: Sequence[str] | None
) -> bool:
    """Return True if a target can be called with these arguments.

    With `keywords` None, the positional arguments must fill all required positional parameters, and
    the keyword-only parameters are not checked.
    """
    try:
        signature = inspect.signature(target)
    except ValueError:  # some functions in C have no signature
        return True
    try:
        if keywords is not None:
            signature.bind(*arguments, **dict.fromkeys(keywords))
            return True
        bound = signature.bind_partial(*arguments)
    except TypeError:
        return False
    required = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in _POSITIONAL and parameter.default is parameter.empty
    ]
    return all(name in bound.arguments for name in required)


def _parameter_names(arguments: Sequence[str], keywords: Sequence[str] | None) -> list[str]:
    """Return the parameters of the expected signature; "..." stands for any options."""
    if keywords is None:
        return [*arguments, "*", "..."]
    return [*arguments, "*", *keywords] if keywords else list(arguments)


def _signature_text(target: Callable[..., Any]) -> str:
    parameters = inspect.signature(target).parameters.values()
    without_types = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return str(inspect.Signature(without_types))
