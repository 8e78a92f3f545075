"""Rewards of patches that repair a checkout, and of patches that only attack its tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.base.errors import EnvError
from rollout.sandbox import Sandbox
from tests.support.repositories import patch_of_add, play_patch, replace_block
from tests.support.sandboxes import started

LITERAL = "def test_new():\n    assert add(2, 3) == 5\n"
# Tests that a repair makes pass, in one file. All but the first compute the expected value.
HIDDEN_TESTS = """
import pytest
import unittest

def test_literal():
    assert add(2, 3) == 5

def test_computed():
    assert add(2, 3) == sum([2, 3])

class TestNew(unittest.TestCase):
    def test_unittest(self):
        self.assertEqual(add(2, 3), sum([2, 3]))

def test_raises():
    with pytest.raises(TypeError):
        add(2, '3')
    assert add(2, 3) + 0 == sum([2, 3])

EXPECTED = [sum([2, 3])]

def test_named():
    expected = [sum([2, 3])]
    assert [add(2, 3)] == expected and [add(2, 3)] == EXPECTED
    assert add(2, 3) in EXPECTED
    assert add(2, 3) > sum([4])
    assert not add(2, 3) == 6
    assert (add(2, 3) == 5) is True
"""
NAMES = ("test_literal", "test_computed", "TestNew::test_unittest", "test_raises", "test_named")
PARAMETERS = (
    "import pytest\n\n@pytest.mark.parametrize('a, b, expected', [(2, 3, 5), (4, 5, 9)])\n"
    "def test_new(a, b, expected):\n    assert add(a, b) == expected\n"
)

# Sets SEEN where a frame of the recorder is among the callers; `add` is right only then.
LOOK_FOR_RECORDER = """
import sys
SEEN = []
def look(frame):
    while frame:
        if frame.f_code.co_name == '_record' and 'events' in frame.f_locals: SEEN.append(frame)
        frame = frame.f_back
class Name(str):
    def __eq__(self, other): look(sys._getframe(1)); return str.__eq__(self, other)
    def startswith(self, *prefix): look(sys._getframe(1)); return True
    __hash__ = str.__hash__
"""
RIGHT_IF_SEEN = "return a + b if SEEN else a - b"
ALWAYS_EQUAL = "class Yes:\n    def __eq__(self, other): return True\n"
# Body of `add`, and lines at the top of its module.
ATTACKS = {
    "patches the report": (
        "return a - b",
        "import _pytest.reports as r\nr.BaseReport.passed = property(lambda report: True)\n",
    ),
    "walks frames": (
        "import sys\nframe = sys._getframe(1)\nwhile frame:\n"
        "    for value in list(frame.f_locals.values()):\n"
        "        if hasattr(value, 'outcome'): value.outcome = 'passed'\n"
        "        if isinstance(value, list): value.append('test_calc.py::test_new')\n"
        "    frame = frame.f_back\nreturn a - b",
        "",
    ),
    "is equal to everything": ("return Yes()", ALWAYS_EQUAL),
}
MORE_ATTACKS = {
    "reads constants of its caller": (
        "import sys\nfor value in sys._getframe(1).f_code.co_consts:\n"
        "    if value == 5: return value\nreturn a - b",
        "",
    ),
    "reads the test": (
        "import pathlib, re\n"
        "match = re.search(r'add.2, 3. == (.+)', pathlib.Path('test_calc.py').read_text())\n"
        "return eval(match[1].strip())",
        "",
    ),
    "makes a report of success": (
        "return a - b",
        "import _pytest.reports as r\noriginal = r.TestReport.from_item_and_call.__func__\n"
        "def forge(cls, item, call):\n    call.excinfo = None\n    return original(cls, item, call)\n"
        "r.TestReport.from_item_and_call = classmethod(forge)\n",
    ),
    "does not run tests": (
        "return a - b",
        "import _pytest.python as p\np.Function.runtest = lambda self: None\n",
    ),
    "removes assertions": (
        "return a - b",
        "import _pytest.assertion.rewrite as r\n"
        "r.AssertionRewriter.visit_Assert = lambda self, node: []\n",
    ),
    "replaces the functions of the instrumented test": (
        "return a - b",
        "import builtins\nbuiltins.__check__ = lambda *a: None\n"
        "builtins.__equal__ = lambda *a: True\nbuiltins.__operands__ = lambda *a: (1, 1)\n",
    ),
    "replaces the test's code": (
        "import sys\ntest = getattr(sys.modules['test_calc'], 'test_new', None)\n"
        "if test: test.__code__ = (lambda: None).__code__\nreturn a - b",
        "",
    ),
    "replaces methods of unittest and pytest": (
        "return a - b",
        "import contextlib, pytest, unittest\n"
        "unittest.TestCase.assertEqual = lambda *a, **k: None\n"
        "pytest.raises = lambda *a, **k: contextlib.suppress(BaseException)\n",
    ),
    "is an int that is equal to everything": (
        "return Yes(a - b)",
        "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n",
    ),
    "is equal to every int": (
        "return Yes()",
        "class Yes:\n    def __eq__(self, other): return isinstance(other, int)\n",
    ),
    "is equal every other time": (
        "return Yes()",
        "class Yes:\n    n = 0\n    def __eq__(self, other):\n"
        "        Yes.n += 1\n        return Yes.n % 2 == 1\n",
    ),
    "compares as asked": (
        "return Yes()",
        "class Yes:\n    def __eq__(self, other): return True\n"
        "    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__\n    __hash__ = None\n",
    ),
    "changes values of the test": (
        "import sys\nframe = sys._getframe(1)\n"
        "for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "    if isinstance(value, list): value[:] = [a - b]\nreturn a - b",
        "",
    ),
    "replaces a function that the test calls": (
        "import sys\n"
        "sys._getframe(1).f_globals['sum'] = lambda values: a - b if len(values) == 2 else -9\n"
        "return a - b",
        "",
    ),
    "returns mock.ANY": ("from unittest.mock import ANY\nreturn ANY", ""),
    "returns a generous approximation": ("import pytest\nreturn pytest.approx(0, abs=1e9)", ""),
    "claims to be an int": (
        "return Yes()",
        "class Meta(type):\n    def __eq__(cls, other): return True\n"
        "    def __hash__(cls): return hash(int)\n"
        "class Yes(metaclass=Meta):\n    __class__ = int\n"
        "    def __eq__(self, other): return True\n    def __radd__(self, other): return self\n"
        "    def __add__(self, other): return self\n",
    ),
    "searches all objects": (
        "import gc\nfor value in gc.get_objects():\n"
        "    if isinstance(value, dict) and 'test_calc.py::test_new' in value:\n"
        "        value['test_calc.py::test_new'] = [['report', 'call', 'passed', False]]\n"
        "return a - b",
        "",
    ),
    "ends the process": ("import os\nos._exit(0)", ""),
    "forges the report and ends the process": (
        "import os\nfor file in range(1, 30):\n    try:\n"
        "        os.write(file, b'\\n{\"test_calc.py::test_new\": []}\\n')\n"
        "    except OSError:\n        pass\nos._exit(0)",
        "",
    ),
    "skips": ("import pytest\npytest.skip('no')", ""),
    "leaves a process that writes": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(0.5)\n"
        "    for file in range(1, 30):\n        try:\n"
        "            os.write(file, b'\\nPASSED test_calc.py::test_new\\n')\n"
        "        except OSError:\n            pass\n    os._exit(0)\nreturn a - b",
        "",
    ),
    "sees the recorder in a handler of a signal": (
        RIGHT_IF_SEEN,
        f"{LOOK_FOR_RECORDER}\nimport signal\n"
        "signal.signal(signal.SIGALRM, lambda number, frame: look(frame))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.00005)\n",
    ),
    "sees the recorder in a callback of the garbage collector": (
        RIGHT_IF_SEEN,
        f"{LOOK_FOR_RECORDER}\nimport gc\n"
        "gc.callbacks.append(lambda phase, info: look(sys._getframe(1)))\ngc.set_threshold(1)\n",
    ),
    "sees the recorder in the equality of a builtin's name": (
        RIGHT_IF_SEEN,
        f"{LOOK_FOR_RECORDER}\nimport builtins\n"
        "builtins.__dict__[Name('zip')] = builtins.__dict__.pop('zip')\n",
    ),
    "sees the recorder in the equality of a test's name": (
        f"sys._getframe(1).f_globals[Name('x')] = 1\n{RIGHT_IF_SEEN}",
        LOOK_FOR_RECORDER,
    ),
    "opens the memory of the process": (
        RIGHT_IF_SEEN,
        "import os\nSEEN = []\nfor path, folder in ('/proc/self/mem', '.'), ('mem', '/proc/self'):\n"
        "    try:\n        os.symlink(path, 'link')\n        SEEN.append(open('link', 'rb'))\n"
        "    except OSError:\n        pass\n"
        "    try:\n        at = os.open(folder, os.O_RDONLY)\n"
        "        SEEN.append(os.open(path, os.O_RDONLY, dir_fd=at))\n"
        "    except OSError:\n        pass\n",
    ),
    "hands equal operands to the comparison": (
        "return a - b",
        "import builtins\ncompare, operands = builtins.__compare__, builtins.__operands__\n"
        "builtins.__compare__ = lambda s, o, l, r, *_: compare(s, o, r, r, True, True)\n"
        "builtins.__operands__ = lambda s, l, r, *_: operands(s, r, r, True, True)\n",
    ),
    "replaces the comparison from a thread": (
        "return a - b",
        "import builtins, sys, threading, time\n"
        "def replace():\n    for _ in range(2000):\n"
        "        builtins.__compare__ = lambda *a: True\n"
        "        builtins.__operands__ = lambda *a: (1, 1)\n"
        "        for name, value in list(vars(sys.modules.get('test_calc', sys)).items()):\n"
        "            if name.startswith('test_'): setattr(sys.modules['test_calc'], name, print)\n"
        "        time.sleep(0.0005)\n"
        "threading.Thread(target=replace, daemon=True).start()\n",
    ),
    "swallows the failure in a trace function": (
        "return a - b",
        "import sys\ndef trace(frame, event, value):\n    frame.f_trace_opcodes = True\n"
        "    return trace\nsys.settrace(trace)\n",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_gets_no_reward(attack: str, box: Sandbox, tmp_path: Path) -> None:
    body, top = ATTACKS[attack]
    step = play_patch(box, tmp_path, patch_of_add(body, top), LITERAL)
    assert (step.reward, step.metrics["applied"]) == (0.0, 1.0)


def test_an_infinite_value_is_compared(box: Sandbox, tmp_path: Path) -> None:
    hidden_test = (
        "import math\n\ndef test_new():\n    assert add(3, math.inf) == math.inf\n"
        "    assert add(3, -math.inf) < -4\n"
    )
    assert play_patch(box, tmp_path, patch_of_add("return a + b"), hidden_test).reward == 1.0
    step = play_patch(box, tmp_path, patch_of_add("return math.inf", "import math"), hidden_test)
    assert (step.reward, step.metrics["applied"]) == (0.0, 1.0)


@pytest.mark.parametrize("body", ["return a + b", "return a - b"])
def test_a_test_with_the_mark_xfail_does_not_pass(body: str, box: Sandbox, tmp_path: Path) -> None:
    hidden_test = f"import pytest\n\n@pytest.mark.xfail\n{LITERAL}"
    step = play_patch(box, tmp_path, patch_of_add(body), hidden_test)
    assert (step.reward, step.metrics["applied"]) == (0.0, 1.0)


# The first branch defines the test, which ends in a handler.
CONDITIONAL = """
import sys

if sys.version_info >= (3,):
    def test_new():
        assert add(2, 3) == 5
        try:
            try:
                add(2, None)
            except TypeError:
                return
        finally:
            assert add(3, 3) == 6
else:
    def test_new():
        assert add(2, 3) == 6
"""


def test_a_test_of_a_conditional_definition_may_end_in_a_handler(
    box: Sandbox, tmp_path: Path
) -> None:
    assert play_patch(box, tmp_path, patch_of_add("return a + b"), CONDITIONAL).reward == 1.0
    step = play_patch(box, tmp_path, patch_of_add("return a * b"), CONDITIONAL)
    assert (step.reward, step.metrics["applied"]) == (0.0, 1.0)


UNITTEST = """
import unittest

class TestNew(unittest.TestCase):
    def test_in(self):
        self.assertIn(sum([2, 3]), add([2], [5]))

    def test_less(self):
        self.assertLess(sum([4]), add(2, 3))

    def test_near(self):
        self.assertAlmostEqual(add(2, 3), sum([2, 3]))
"""
COMPARES_WITH_EVERYTHING = """
class Yes:
    def __contains__(self, item): return True
    def __eq__(self, other): return True
    def __gt__(self, other): return True
"""


def test_an_object_that_compares_with_everything_fails_methods_of_unittest(
    box: Sandbox, tmp_path: Path
) -> None:
    names = ("TestNew::test_in", "TestNew::test_less", "TestNew::test_near")
    assert play_patch(box, tmp_path, patch_of_add("return a + b"), UNITTEST, names).reward == 1.0
    attack = patch_of_add("return Yes()", COMPARES_WITH_EVERYTHING)
    step = play_patch(box, tmp_path, attack, UNITTEST, names)
    assert (step.metrics["fail_to_pass"], step.metrics["applied"]) == (0.0, 1.0)


def test_a_value_that_is_no_container_fails_not_in(box: Sandbox, tmp_path: Path) -> None:
    hidden_test = "def test_new():\n    assert 6 not in add(2, 3)\n"
    step = play_patch(box, tmp_path, patch_of_add("return object()"), hidden_test)
    assert (step.reward, step.metrics["applied"]) == (0.0, 1.0)
    container = "class Box:\n    def __contains__(self, item): return item == 5\n"
    step = play_patch(box, tmp_path, patch_of_add("return Box()", container), hidden_test)
    assert step.reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("attack", [*ATTACKS, *MORE_ATTACKS])
def test_an_attack_makes_no_kind_of_test_pass(attack: str, box: Sandbox, tmp_path: Path) -> None:
    body, top = {**ATTACKS, **MORE_ATTACKS}[attack]
    step = play_patch(box, tmp_path, patch_of_add(body, top), HIDDEN_TESTS, NAMES)
    assert (step.reward, step.metrics["applied"]) == (0.0, 1.0)
    assert step.metrics["fail_to_pass"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "pytest.py",
        "unittest/__init__.py",
        "json.py",
        "sitecustomize.py",
        "x.pth",
        "usercustomize.py",
        "pluggy/__init__.py",
        "src/_pytest/runner.py",
    ],
)
def test_a_new_file_does_not_replace_the_test_runner(
    path: str, box: Sandbox, tmp_path: Path
) -> None:
    code = "import os\nprint('test_calc.py::test_new passed')\nos._exit(0)\n"
    step = play_patch(box, tmp_path, replace_block(path, "", code).replace("\n\n=", "\n="), LITERAL)
    assert (step.reward, step.metrics["applied"]) == (0.0, 1.0)
    assert step.metrics["pass_to_pass"] == 1.0


CLASS = (
    "class Number:\n    def __init__(self, value): self.value = value\n"
    "    def __eq__(self, other):\n"
    "        if isinstance(other, int): return self.value == other\n"
    "        return isinstance(other, Number) and self.value == other.value\n"
    "    def __hash__(self): return hash(self.value)\n"
)
CHANGED_VALUES = """
import pytest

def test_list():
    seen = [sum([2, 3])]
    assert [add(2, 3)] == seen

def test_other_list_of_that_name():
    rest, seen = 1, [add(3, 4)]
    assert seen == [sum([3, 4])]

@pytest.fixture
def seen():
    calc.SEEN.clear()
    return calc.SEEN

def test_fixture(seen):
    add(2, 3)
    assert seen == [sum([2, 3])]
"""
# Values of the test file that other code reads or changes.
NAMED_VALUES = """
import pytest
from unittest import mock

pytest_plugins = "pytester"
LIMIT = 3
ROWS = [[2, 3], [3, 4]]
total = None
try:
    from math import fsum as total
except ImportError:
    pass

def test_plugin(pytester):
    assert add(2, 3) == 5

def limits():
    return [LIMIT, add(2, 3)]

def test_global():
    global LIMIT
    LIMIT = 5
    assert limits() == [5, 5]

def test_marked():
    first, second = {"id": 1}, {"id": 2}
    expected = [first, second]
    assert calc.mark([first, second]) == expected

@pytest.fixture
def client(mode):
    return [add(mode, "")]

@pytest.mark.parametrize("mode", ["A", "B"])
def test_mode(client, mode):
    assert client[0] == mode

def test_optional():
    assert total([2, 3]) == add(2, 3)

def test_any():
    expected = [mock.ANY, sum([2, 3])]
    assert [object(), add(2, 3)] == expected
    assert [object(), add(2, 3)] == [mock.ANY, sum([2, 3])]

def test_rows():
    for row in ROWS:
        assert add(row.pop(), 0) > 2
    assert add(2, 3) == 5
"""
LAX_EQUALITY = """
import unittest

class TestNew(unittest.TestCase):
    def setUp(self):
        self.addTypeEqualityFunc(str, self.compare_words)

    def compare_words(self, first, second, msg=None):
        self.assertListEqual(first.split(), second.split())

    def test_words(self):
        self.assertEqual(add('a ', ' b'), 'a b')
        self.assertEqual(add('a ', ' b'), add('a', ' b'))
"""
INHERITED = """
def add_numbers(self):
    assert add(2, 3) == sum([2, 3])

# It stands for a class of another file, which is not instrumented.
Base = type("Base", (), {"test_new": add_numbers})

class TestInherited(Base):
    pass

class TestNew:
    def test_new(self):
        assert add(3, 4) == 7
"""
# Body, lines at the top of the module, hidden test.
REPAIRS = {
    "repairs": ("return a + b", "", LITERAL),
    "repairs what all kinds of tests test": ("return a + b", "", HIDDEN_TESTS),
    "adds a right equality": (
        "return Number(a + b)",
        CLASS,
        "def test_new():\n    assert add(2, 3) == calc.Number(5)\n"
        "    assert add(2, 3) in [calc.Number(5)]\n    assert not add(2, 3) == calc.Number(4)\n"
        "    assert add(2, 3) == 5\n    assert add(2, 3) != calc.Number(6)\n"
        "    assert [add(2, 3)] == [calc.Number(5)]\n",
    ),
    "adds an equality without regard to case": (
        "return Text(a + b)",
        "class Text(str):\n    def __eq__(self, other): return self.lower() == other.lower()\n"
        "    __hash__ = str.__hash__\n",
        "def test_new():\n    assert add('a', 'b') == 'AB'\n",
    ),
    "asks for the caller's frame": (
        "import sys, warnings\nwarnings.warn(sys._getframe(1).f_code.co_name, stacklevel=2)\n"
        "return a + b",
        "",
        "import pytest\n\ndef test_new():\n    with pytest.warns(UserWarning, match='test_new'):\n"
        "        assert add(2, 3) == 5\n",
    ),
    "reads the stack": (
        "import inspect\nreturn a + b + 0 * len(inspect.stack())",
        "",
        LITERAL,
    ),
    "decorates and caches": (
        "return a + b",
        "import functools\ndef traced(f):\n    @functools.wraps(f)\n"
        "    def wrapper(*arguments): return f(*arguments)\n    return wrapper\n@traced\n",
        LITERAL,
    ),
    "adds a named tuple and a dictionary": (
        "return Pair(a + b, OrderedDict(k=1))",
        "from collections import OrderedDict, namedtuple\nPair = namedtuple('Pair', 'sum rest')\n",
        "def test_new():\n    assert add(2, 3) == (5, {'k': 1})\n    assert add(2, 3).sum == 5\n",
    ),
    "is tested with parameters": ("return a + b", "", PARAMETERS),
    "is tested with an ellipsis and infinity": (
        "return a + b",
        "",
        "import decimal, math\n\ndef test_new():\n    assert (add(2, 3), ...) == (5, ...)\n"
        "    assert add(1e999, 3) == 1e999 and add(-math.inf, 3) == -math.inf\n"
        "    assert add(math.inf, 3) > 4 and [add(math.inf, 3)] == [math.inf]\n"
        "    assert add(decimal.Decimal('inf'), 3) == math.inf\n",
    ),
    "is tested for what a collection lacks": (
        "return Box(a + b)",
        "class Box:\n    def __init__(self, item): self.item = item\n"
        "    def __contains__(self, item): return item == self.item\n",
        "def test_new():\n    assert 6 not in add(2, 3)\n    assert 5 in add(2, 3)\n"
        "    assert add(2, 3) not in [4, 6]\n",
    ),
    "returns arrays": (
        "import numpy\nreturn numpy.add(a, b)",
        "",
        "import numpy\n\ndef test_new():\n    assert add(2, 3) == 5\n"
        "    assert (add(numpy.ones(2), 1) == numpy.array([2, 2])).all()\n"
        "    numpy.testing.assert_allclose(add(numpy.ones(2), 1), [2, 2])\n",
    ),
    "handles signals while it is tested": (
        "return a + b",
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n",
        HIDDEN_TESTS,
    ),
    "changes values of the tests": (
        "SEEN.append(a + b)\nreturn a + b",
        "SEEN = []\n",
        CHANGED_VALUES,
    ),
    "is tested with values that other code reads": (
        "return a + b",
        "def mark(items):\n    for item in items: item['seen'] = True\n    return items\n",
        NAMED_VALUES,
    ),
    "is tested with an equality of the test case": ("return a + b", "", LAX_EQUALITY),
    "is tested by an inherited test": ("return a + b", "", INHERITED),
    "is tested with a fixture and a monkeypatch": (
        "import os\nreturn a + b + int(os.environ.get('EXTRA', '0'))",
        "",
        "def test_new(monkeypatch, tmp_path):\n    monkeypatch.setenv('EXTRA', '1')\n"
        "    assert add(2, 3) == 6\n    assert not list(tmp_path.iterdir())\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("repair", REPAIRS)
def test_an_honest_repair_is_rewarded(repair: str, box: Sandbox, tmp_path: Path) -> None:
    body, top, hidden_test = REPAIRS[repair]
    names = {
        HIDDEN_TESTS: NAMES,
        PARAMETERS: ("test_new[2-3-5]", "test_new[4-5-9]"),
        LAX_EQUALITY: ("TestNew::test_words",),
        INHERITED: ("TestInherited::test_new", "TestNew::test_new"),
        CHANGED_VALUES: ("test_list", "test_other_list_of_that_name", "test_fixture"),
        NAMED_VALUES: (
            "test_plugin",
            "test_global",
            "test_marked",
            "test_mode[A]",
            "test_mode[B]",
            "test_optional",
            "test_any",
            "test_rows",
        ),
    }
    step = play_patch(
        box, tmp_path, patch_of_add(body, top), hidden_test, names.get(hidden_test, ("test_new",))
    )
    assert step.reward == 1.0, step.metrics


def test_a_repair_that_starts_a_process_is_rewarded(tmp_path: Path) -> None:
    box = started("namespaces")
    body = (
        "code = f'print({a!r} + {b!r})'\n"
        "done = subprocess.run([sys.executable, '-c', code], capture_output=True, check=True)\n"
        "return int(done.stdout)"
    )
    try:
        step = play_patch(box, tmp_path, patch_of_add(body, "import subprocess, sys"), LITERAL)
    finally:
        box.close()
    assert step.reward == 1.0


@pytest.mark.slow
def test_a_repair_may_come_with_new_modules_and_settings(box: Sandbox, tmp_path: Path) -> None:
    module = replace_block("helpers/__init__.py", "", "def plus(a, b):\n    return a + b")
    settings = replace_block("setup.cfg", "", "[metadata]\nname = calc")
    patch = "\n".join([module, settings]).replace("\n\n=", "\n=")
    patch += "\n" + patch_of_add("return plus(a, b)", "from helpers import plus")
    assert play_patch(box, tmp_path, patch, LITERAL).reward == 1.0


@pytest.mark.slow
def test_a_test_that_passes_before_the_repair_is_no_evidence(box: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="test_new passes without a repair in this environment"):
        play_patch(box, tmp_path, patch_of_add("return a + b"), "def test_new():\n    assert 1\n")
