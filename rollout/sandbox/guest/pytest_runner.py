"""Program that runs an instrumented test file with pytest and reports what its tests see.

It reads a request as JSON from stdin, and writes one line to stdout: the mark, which is a secret of
the run, a space and the report as JSON. `rollout/environments/hidden_verdicts.py` writes the request
and reads the report.

The code under test runs in this process and may be hostile. The report is therefore kept in a
generator, which takes events only from the functions of this program and from the test file. An
audit hook hides its frame, and `_make_sender` keeps handlers of signals and of the garbage
collector from running in it.
"""

import ast
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import signal
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

Event = tuple[Any, ...]
Send = Callable[[Event], None]
Binding = tuple[Mapping[str, Any], str, Any]  # namespace, name and value
AuditHook = Callable[[str, tuple[Any, ...]], None]

_MAX_DEPTH = 40  # of nested lists and dictionaries in a reported value
_UNKNOWN = "?"  # text of a value that is not plain data
_INFINITY = float("inf")
# Modules that decide whether a test passes.
_GUARDED_MODULES = ("_pytest", "pytest", "pluggy", "unittest.case", "unittest.result")
# Modules whose classes patched code cannot change. Plug-ins of pytest change those of others.
_FROZEN_MODULES = (
    "_pytest._code.code",
    "_pytest.outcomes",
    "_pytest.python_api",
    "_pytest.raises",
    "_pytest.recwarn",
    "_pytest.reports",
    "_pytest.runner",
    "_pytest.unittest",
    "pluggy._hooks",
    "pluggy._manager",
    "pluggy._result",
    "unittest.case",
    "unittest.result",
)
_GUARDED_BUILTINS = (
    "abs",
    "all",
    "any",
    "AssertionError",
    "BaseException",
    "bool",
    "bytes",
    "dict",
    "enumerate",
    "Exception",
    "float",
    "frozenset",
    "getattr",
    "hasattr",
    "hash",
    "id",
    "int",
    "isinstance",
    "issubclass",
    "iter",
    "len",
    "list",
    "map",
    "max",
    "min",
    "next",
    "object",
    "range",
    "repr",
    "reversed",
    "round",
    "set",
    "sorted",
    "str",
    "sum",
    "super",
    "tuple",
    "type",
    "zip",
)
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_FLAGS_OFFSET = 168  # of tp_flags in a type object on 64-bit machines

# Audit events that reach the frames, objects or memory of this program, and the permission that
# each of them needs.
_REFUSED_EVENTS = {
    "gc.get_objects": "gc",
    "gc.get_referrers": "gc",
    "gc.get_referents": "gc",
    "sys._current_frames": "trace",
    "sys._current_exceptions": "trace",
    "sys.settrace": "trace",
    "sys.setprofile": "trace",
    "sys.addaudithook": "trace",
    "cpython._PySys_ClearAuditHooks": "never",
}

# Bound here, so that patched code cannot replace these functions later.
_get_frame = sys._getframe
_get_thread = threading.get_ident
_get_handler = signal.getsignal
_set_handler = signal.signal
_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
_is_collecting = gc.isenabled
_stop_collecting = gc.disable
_start_collecting = gc.enable
_shuffle = random.SystemRandom().shuffle
_encode_string = json.encoder.encode_basestring_ascii
_mro_of = type.__dict__["__mro__"].__get__
_dict_of = type.__dict__["__dict__"].__get__

# Builtin types of plain data, with the function that copies an instance of a subclass to the type.
_SCALARS: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: value,
    int: int.__index__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    type(None): lambda value: value,
}
_SEQUENCES: dict[type, Callable[[Any], Iterator[Any]]] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
}


_OPERATORS: dict[str, Callable[[Any, Any], object]] = {
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "in": lambda left, right: left in right,
    "not in": lambda left, right: left not in right,
}
_NEGATIONS = {"!=": "==", "not in": "in"}


class _Withheld:
    """Stand-in for a withheld value among a test's parameters."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.__name__ = f"withheld{number}"  # pytest puts it into the test's name


class _InfiniteFloat(float):
    """Infinity, or minus infinity, whose `repr` is a literal."""

    def __repr__(self) -> str:
        return "1e999" if self > 0 else "-1e999"


class _NotPlain(Exception):
    """Error of a value that is not plain data."""


def _main() -> None:
    # Neither the folder of the repository nor modules in it may stand in for pytest's.
    folder = os.getcwd()
    sys.path[:] = [path for path in sys.path if path != folder]
    import pytest
    from _pytest.config import default_plugins

    for name in default_plugins:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"_pytest.{name}")
    request = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the mark cannot be read again
    report_file = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    recorder = _record(request.pop("mark"), report_file, request)
    next(recorder)
    send = _make_sender(recorder)
    test_file = request["module"]
    _define_names(send, request["candidates"])
    hook = _make_audit_hook(recorder, send, folder, test_file, request["allowed"])
    sys.modules["__main__"] = types.ModuleType("__main__")

    options = ["-q", "--tb=no", "--show-capture=no", "--rootdir=.", "-p", "no:cacheprovider"]
    options.append("--assert=rewrite")  # the audit hook knows pytest's importer of test files
    with contextlib.suppress(BaseException):
        plugin = _make_plugin(send, hook, folder, request["computing_modules"])
        pytest.main([*options, test_file], plugins=[plugin])
    with contextlib.suppress(StopIteration):
        send(("finish",))
    os._exit(0)  # exit handlers of the tested code do not run


def _make_sender(recorder: Generator[None, Event, None]) -> Send:
    """Return the function that sends an event to the recorder while nothing can interrupt it.

    Patched code could read the recorder's frame in a handler of a signal, or in a callback or a
    finalizer that the garbage collector runs.
    """
    main_thread = _get_thread()

    def send(event: Event) -> None:
        handlers: list[tuple[signal.Signals, Any]] = []
        if _get_thread() == main_thread:  # Python runs handlers in the main thread only
            for number in _SIGNALS:
                handler = _get_handler(number)
                if callable(handler):
                    handlers.append((number, handler))
                    _set_handler(number, signal.SIG_IGN)
        is_collecting = _is_collecting()
        _stop_collecting()
        try:
            recorder.send(event)
        finally:
            if is_collecting:
                _start_collecting()
            for number, handler in handlers:
                _set_handler(number, handler)

    return send


def _record(mark: str, report_file: int, request: dict[str, Any]) -> Generator[None, Event, None]:
    """Collect the events of a run, and write the report when the run has finished.

    An event is a tuple that begins with its kind:

    - ("loaded", modules): the modules are imported whose functions must not be replaced.
    - ("module", code, globals): of the test file.
    - ("test", name): a test begins.
    - ("report", ...): pytest's report about the test.
    - ("site", ...): the value that an assertion has seen.
    - ("end", ...): the test has ended.
    - ("finish",): all tests have ended.

    Events that do not come from the functions of this program are dropped, and so are sites and
    ends that do not come from the code of the test file. Reports and ends are also dropped if a
    guarded function was replaced (see `_guarded_bindings`), and ends if the test file's names are
    bound to other values. An event that equals one of the test's last 100 is kept once.

    Args:
        mark: secret at the start of the report's line.
        report_file: descriptor to which the report is written.
        request: names of the test file (see `HiddenTestFile`).
    """
    program_code: dict[int, types.CodeType] = {}  # code of this program, by id
    for item in globals().values():
        if type(item) is types.FunctionType:
            _collect_code(item.__code__, program_code)
    test_code: dict[int, types.CodeType] = {}  # code of the test file, by id
    test_globals: dict[str, Any] = {}
    bindings: list[Binding] = []
    names: _TestNames | None = None
    write = os.write
    events: dict[str, list[Event]] = {}  # by name of the test
    test = ""

    while True:
        event = yield
        callers = (_get_frame(1), _get_frame(2))  # the sender, and the function that called it
        if any(program_code.get(id(caller.f_code)) is not caller.f_code for caller in callers):
            continue
        kind = event[0]
        if kind == "finish":
            break
        if kind == "loaded" and not bindings:
            bindings = _guarded_bindings(event[1])
        if kind == "module" and not test_code:
            _collect_code(event[1], test_code)
            test_globals = event[2]
        if kind == "test":
            test = event[1]
            if names is None:
                names = _TestNames(test_globals, request)
        if kind not in ("report", "site", "end"):
            continue
        if any(type(item) not in (bool, int, str) for item in event):
            continue  # an object of patched code, whose equality would run here

        if kind != "site" and not _are_unchanged(bindings):
            continue
        if kind != "report":
            frame = _get_frame(3)
            is_genuine = test_code.get(id(frame.f_code)) is frame.f_code
            if not is_genuine or frame.f_globals is not test_globals:
                continue
        if kind == "end" and (names is None or not names.are_unchanged()):
            continue
        test_events = events.setdefault(test, [])
        if event not in test_events[-100:]:
            test_events.append(event)

    line = f"\n{mark} {_to_json(events)}\n".encode()
    while line:
        line = line[write(report_file, line) :]


class _TestNames:
    """The test file's module-level names, and a check that only statements of the file have bound them."""

    def __init__(self, scope: dict[str, Any], request: dict[str, Any]) -> None:
        self._scope = scope
        self._rebound = request["rebound_names"]
        self._values = self._bound_values()
        self._has_foreign_names = request["names"] is not None and any(
            name not in request["names"] for name in self._values
        )

    def are_unchanged(self) -> bool:
        """Return True if every name is one of the file, and bound to the same object as before the tests."""
        values = self._bound_values()
        if self._has_foreign_names or list(values) != list(self._values):
            return False
        return all(value is self._values[name] for name, value in values.items())

    def _bound_values(self) -> dict[str, Any]:
        values = {}
        for name, value in self._scope.items():
            if type(name) is not str:  # its methods would run here
                name = "?"
            # Python and pytest bind names that start with "__" or "@".
            if name not in self._rebound and not name.startswith(("__", "@")):
                values[name] = value
        return values


def _to_json(value: Any) -> str:
    """Return the JSON of a value of exact builtin types; patched code can replace json.dumps."""
    kind = type(value)
    if kind is str:
        return _encode_string(value)
    if kind is dict:
        items = [f"{_encode_string(key)}:{_to_json(item)}" for key, item in value.items()]
        return "{" + ",".join(items) + "}"
    if kind is list or kind is tuple:
        return "[" + ",".join([_to_json(item) for item in value]) + "]"
    if kind is bool:
        return "true" if value else "false"
    return int.__repr__(value)


def _collect_code(code: types.CodeType, genuine: dict[int, types.CodeType]) -> None:
    """Add a code object and all code objects inside of it."""
    genuine[id(code)] = code
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            _collect_code(constant, genuine)


def _freeze_types(modules: Iterable[str]) -> None:
    """Make classes that decide whether a test passes immutable.

    Args:
        modules: names of the modules that define the classes.
    """
    for name in modules:
        module = sys.modules.get(name)
        if module is None:  # pytest's modules differ from version to version
            continue
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                flags = ctypes.c_ulong.from_address(id(value) + _FLAGS_OFFSET)
                # Another Python version may have the flags elsewhere.
                if flags.value == value.__flags__:
                    flags.value |= _IMMUTABLE_TYPE


def _is_guarded(name: str) -> bool:
    return name.startswith(_GUARDED_MODULES)


def _guarded_bindings(modules: list[str]) -> list[Binding]:
    """Return the functions and classes that decide whether a test passes.

    Args:
        modules: names of further modules, in addition to those of pytest and unittest.
    """
    bindings: list[Binding] = []
    for module_name, module in list(sys.modules.items()):
        if not _is_guarded(module_name) and module_name not in modules:
            continue
        for name, value in vars(module).items():
            if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
                bindings.append((vars(module), name, value))
            # pytest adds attributes to these classes, so they cannot be made immutable. Their members are
            # compared instead.
            if isinstance(value, type) and value.__module__ == "_pytest.python":
                bindings += [(vars(value), key, member) for key, member in vars(value).items()]
    for name, value in vars(builtins).items():
        if name in _GUARDED_BUILTINS or isinstance(value, types.FunctionType):
            bindings.append((vars(builtins), name, value))
    return bindings


def _are_unchanged(bindings: list[Binding]) -> bool:
    """Return True if every name has the value that it had before the tests.

    A scope with a name that is not a plain string counts as changed, because looking a name up could
    call `__eq__` of the code under test.
    """
    scopes = {id(scope): scope for scope, _, _ in bindings}
    for scope in scopes.values():
        if any(type(name) is not str for name in scope):
            return False
    return all(scope.get(name) is value for scope, name, value in bindings)


def _make_plugin(send: Send, hook: AuditHook, folder: str, computing_modules: list[str]) -> object:
    """Return the plug-in of pytest that reports which test runs, and pytest's reports of it.

    Args:
        send: takes events.
        hook: audit hook, which is added before code of the repository runs.
        folder: folder of the repository.
        computing_modules: modules with which tests compute expected values.
    """
    import pytest

    class Plugin:
        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_load_initial_conftests(self) -> Iterator[None]:
            # Installed plug-ins have been loaded, and no code of the repository.
            for name in computing_modules:
                importlib.import_module(name)
            _freeze_types([*_FROZEN_MODULES, *computing_modules])
            send(("loaded", computing_modules))
            sys.addaudithook(hook)
            sys.path.insert(0, folder)
            yield

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
            send(("test", str(item.nodeid)))
            yield

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report: Any) -> None:
            is_expected_failure = hasattr(report, "wasxfail")
            send(("report", str(report.when), str(report.outcome), is_expected_failure))

    return Plugin()


def _make_audit_hook(
    recorder: Generator[None, Event, None],
    send: Send,
    folder: str,
    test_file: str,
    allowed: list[str],
) -> AuditHook:
    """Return an audit hook that reports the test file's code at its import, and guards this program.

    It hides the recorder's frame, and refuses what the code under test may not do: reach this program's
    objects (`_REFUSED_EVENTS`, ctypes), change functions outside of the repository, or open the
    memory of a process.

    Args:
        recorder: generator whose frame stays hidden.
        send: takes events.
        folder: folder of the repository.
        test_file: path of the test file in the folder.
        allowed: permissions of the code under test: "ctypes", and values of `_REFUSED_EVENTS`. They
            are those that the repository's code needs before the patch.
    """
    from _pytest.assertion.rewrite import AssertionRewritingHook

    import_code = AssertionRewritingHook.exec_module.__code__
    test_path = os.path.join(folder, test_file)
    refused = {event for event, name in _REFUSED_EVENTS.items() if name not in allowed}
    may_use_ctypes = "ctypes" in allowed

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec":
            code = arguments[0]
            caller = _get_frame(1)
            if caller.f_code is import_code and code.co_filename == test_path:
                send(("module", code, vars(caller.f_locals["module"])))
        elif event == "object.__getattr__":
            if arguments[0] is recorder:
                raise PermissionError("the report of a test run is private")
        elif event == "object.__setattr__":
            is_code = arguments[1] == "__code__" and _is_called_by_repository(folder, test_path)
            if is_code and not _is_patchable(arguments[0], folder, test_path):
                raise PermissionError("only functions of the repository may be changed")
        elif event in refused or (event.startswith("ctypes.") and not may_use_ctypes):
            if _is_called_by_repository(folder, test_path):
                raise PermissionError(f"{event} is not allowed while tests run")
        elif event in ("open", "os.symlink") and _is_memory(arguments[0]):
            raise PermissionError("the memory of processes is private")

    return hook


def _is_memory(path: object) -> bool:
    """Return True if a path may be the memory of a process, such as `/proc/self/mem`."""
    if isinstance(path, bytes):
        return bytes.rpartition(path, b"/")[2] == b"mem"
    return isinstance(path, str) and str.rpartition(path, "/")[2] == "mem"


def _is_patchable(function: object, folder: str, test_path: str) -> bool:
    """Return True if a function's code may be replaced, because the repository defines it."""
    if type(function) is not types.FunctionType:
        return True
    path = os.path.abspath(function.__code__.co_filename)
    return path.startswith(f"{folder}/") and path != test_path


def _is_called_by_repository(folder: str, test_path: str) -> bool:
    """Return True if the code under test is the nearest caller outside of installed packages."""
    frame: types.FrameType | None = _get_frame(2)
    while frame is not None and frame.f_globals is not globals():
        path = frame.f_code.co_filename
        if path == test_path:
            return False
        if path.startswith((f"{folder}/", "<string>")):
            return True
        frame = frame.f_back
    return False


def _define_names(send: Send, candidates: dict[str, list[str]]) -> None:
    """Define the functions that instrumented test files call.

    Args:
        send: takes events.
        candidates: Python literals by site and number of the withheld value, "-1" for none. A
            value that is not plain data is compared with them.
    """
    choices = {}
    for key, texts in candidates.items():
        choices[key] = [ast.literal_eval(text) for text in texts]

    def check(site: int, value: object, parameter: object) -> None:
        """Report a value; if it is not plain data and has candidates, report how it compares with them."""
        number = parameter.number if type(parameter) is _Withheld else -1
        text = _describe(value)
        key = f"{site}/{number}"
        if text == _UNKNOWN and key in choices:
            text = "!" + ";".join(_comparisons(value, choice) for choice in choices[key])
        send(("site", site, number, text))

    def is_trustworthy(
        operator: str, left: object, right: object, left_is_trusted: bool, right_is_trusted: bool
    ) -> bool:
        """Return False if a comparison is true only because the code under test has arranged it.

        That is so if the comparison is also true for objects for which it must be false, as with an
        `__eq__` that is always true. Trusted operands, such as `mock.ANY`, may rightly do this.
        """
        if not left_is_trusted and not _tells_apart(operator, left, right, is_left=True):
            return False
        return right_is_trusted or _tells_apart(operator, right, left, is_left=False)

    def compare(
        site: int | None,
        operator: str,
        left: object,
        right: object,
        left_is_trusted: bool,
        right_is_trusted: bool,
    ) -> object:
        """Return the result of a comparison, and report it if it is true and has a site.

        An equality, order or membership that is not trustworthy counts as false and is not reported:
        the function returns False, or True for `!=` and `not in`.
        """
        result = _OPERATORS[operator](left, right)
        try:
            is_true = bool(result)
        except Exception:  # such as an array with a result for each element
            return result
        is_negation = operator in _NEGATIONS
        positive_is_true = is_true != is_negation  # `==` for `!=`, and `in` for `not in`
        if positive_is_true:
            positive = _NEGATIONS.get(operator, operator)
            if not is_trustworthy(positive, left, right, left_is_trusted, right_is_trusted):
                return is_negation
        if is_true and site is not None:
            send(("site", site, -1, "=True"))  # no withheld value; the text of True
        return result

    def operands(
        site: int, left: object, right: object, left_is_trusted: bool, right_is_trusted: bool
    ) -> tuple[object, object]:
        """Return the operands of a method that checks equality, such as assertEqual.

        Report the comparison if they are equal. If their equality is not trustworthy, return unequal
        operands instead.
        """
        if left == right:
            if not is_trustworthy("==", left, right, left_is_trusted, right_is_trusted):
                return 0, 1
            send(("site", site, -1, "=True"))  # no withheld value; the text of True
        return left, right

    def guard(value: object) -> object:
        """Return the value, or a plain object if the value claims to equal everything."""
        return object() if _equals_everything(value) else value

    def end(number: int) -> None:
        """Report that a test function has reached its end."""
        send(("end", number))

    scope: Any = builtins
    scope.__check__ = check
    scope.__compare__ = compare
    scope.__operands__ = operands
    scope.__guard__ = guard
    scope.__end__ = end
    scope.__withheld__ = _Withheld


def _comparisons(value: Any, choice: Any) -> str:
    """Return the operators that are true between a value and a candidate, joined by commas.

    `has` and `lacks` mean `choice in value` and `choice not in value`. An operator that raises an
    error is not true.
    """
    true_operators = []
    for operator, comparison in _OPERATORS.items():
        if _is_true(lambda comparison=comparison: comparison(value, choice)):  # type: ignore[misc]
            true_operators.append(operator)
    if _is_true(lambda: choice in value):
        true_operators.append("has")
    if _is_true(lambda: choice not in value):
        true_operators.append("lacks")
    return ",".join(true_operators) or "-"


def _describe(value: object) -> str:
    """Return plain data as "=" and its Python literal, and "?" for any other value."""
    try:
        return f"={_plain(value, 0)!r}"
    except (_NotPlain, TypeError, ValueError, RecursionError):
        return _UNKNOWN


def _plain(value: Any, depth: int) -> Any:
    """Copy a value to exact builtin types, and infinity to `_InfiniteFloat`.

    Code of the value's class does not run.
    """
    if depth > _MAX_DEPTH:
        raise _NotPlain
    base = _builtin_base(type(value))
    if base in _SCALARS:
        scalar = _SCALARS[base](value)
        if base is float and scalar in (_INFINITY, -_INFINITY):
            return _InfiniteFloat(scalar)
        if base in (float, complex) and scalar - scalar != 0:
            raise _NotPlain  # NaN and infinite complex numbers have no literal
        return scalar
    if base in _SEQUENCES:
        items = [_plain(item, depth + 1) for item in _SEQUENCES[base](value)]
        return set(items) if base in (set, frozenset) else base(items)
    if base is dict:
        return {_plain(key, depth + 1): _plain(item, depth + 1) for key, item in dict.items(value)}
    raise _NotPlain


def _builtin_base(kind: type) -> type:
    """Return the builtin type whose equality a type has; `object` if there is none."""
    base: type
    for base in _mro_of(kind):
        if base in _SCALARS or base in _SEQUENCES or base is dict:
            return base
        if "__eq__" in _dict_of(base):
            break
    return object


def _tells_apart(operator: str, value: Any, other: Any, *, is_left: bool) -> bool:
    """Return False if a true comparison of a value is also true for objects for which it must be false.

    Args:
        operator: operator of a comparison that is true.
        value: operand of the comparison.
        other: the other operand. The value must not equal all of its changed copies.
        is_left: True if the value is the left operand.
    """
    if _describe(value) != _UNKNOWN:
        return True
    base = _builtin_base(type(value))
    if base is dict or base in _SEQUENCES:
        items = dict.values(value) if base is dict else _SEQUENCES[base](value)
        return all(_tells_apart("==", item, item, is_left=True) for item in items)

    def compares_with(decoy: object) -> bool:
        operands = (value, decoy) if is_left else (decoy, value)
        return _is_true(lambda: _OPERATORS[operator](*operands))

    # In random order, so that an equality that counts its calls does not know the right answers.
    decoys = _changed_copies(other) if operator == "==" else []
    questions: list[Any] = ["same", "same", "foreign", "foreign", *range(len(decoys))]
    _shuffle(questions)
    equal_decoys = 0
    for question in questions:
        if question == "foreign":
            if compares_with(object()) or _equals_everything(value):
                return False
        elif question == "same":
            if value is not other and not compares_with(other):
                return False
        else:
            equal_decoys += compares_with(decoys[question])
    return not decoys or equal_decoys < len(decoys)


def _equals_everything(value: Any) -> bool:
    """Return True if a value claims to equal an object that nothing equals."""
    return _describe(value) == _UNKNOWN and _is_true(lambda: value == object())


def _is_true(compute: Callable[[], object]) -> bool:
    try:
        return bool(compute())
    except Exception:  # an honest comparison may refuse objects that it does not know
        return False


def _changed_copies(value: Any) -> list[Any]:
    """Return copies of a value that differ in one place; [] if the value cannot be copied."""
    match value:
        case bool() | None:
            return [not value]
        case float() if value in (_INFINITY, -_INFINITY):
            return [0.0, -value]
        case int() | float() | complex():
            return [value + 1, value - 3, value * 2 + 11]
        case str():
            return [f"{value}q", f"{value[:-1]}#7", "\x1a"]
        case bytes():
            return [value + b"q", b"\x1a"]
        case list() | tuple():
            return [[*value, object()], [object()]]
        case dict():
            return [{**value, object(): 1}]
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict:
        return []
    copies = []
    for name in attributes:
        try:
            changed = object.__new__(type(value))
        except TypeError:  # the class extends a builtin type
            return []
        changed.__dict__.update({**attributes, name: object()})
        copies.append(changed)
    return copies


_main()
