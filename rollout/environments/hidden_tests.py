"""Test files whose expected values are withheld, so that patched code cannot find them.

A test runs in the same process as the patched code. `instrument` therefore rewrites a test file
before it enters the sandbox: an assertion such as `assert add(2, 3) == 5` becomes
`__check__(7, add(2, 3), None)`, which reports the value of `add(2, 3)` for comparison number 7. The
last argument is None, because 5 is not a parameter of the test. 5 stays outside the sandbox, where
`rollout/environments/hidden_verdicts.py` compares it with the reported value. Every test reports its
end too.

Only literals in assertions and in `parametrize` lists are withheld. Values with a name, as in
`expected = 5`, stay in the file, because other code may read them.
"""

import ast
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

# Names of functions that the program in the sandbox (`rollout/sandbox/guest/pytest_runner.py`) defines
# for the rewritten files, with their arguments.
CHECK = "__check__"  # (site, value, parameter or None): report a value
# (site or None, operator, left, right, left is trusted, right is trusted): compare two values, and report
# to the site if the comparison is true
COMPARE = "__compare__"
# Likewise for methods such as assertEqual and assertListEqual; returns their first two arguments.
OPERANDS = "__operands__"
GUARD = "__guard__"  # (value): return the value, or another one if it claims to equal everything
END = "__end__"  # (number of the test function): report that the test has reached its end
WITHHELD = "__withheld__"  # (number): stand for a withheld value among a test's parameters

Comparison = Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in", "is", "is not"]
_COMPARISONS: dict[type[ast.cmpop], Comparison] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_OPERATORS = {comparison: operator for operator, comparison in _COMPARISONS.items()}
# The negation of `<` is not `>=`: both are false for NaN and for sets that do not contain each other.
_NEGATIONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
# Methods of unittest.TestCase that compare their first two arguments by an equality function of the test
# case (see `addTypeEqualityFunc`), or else by `==`.
_EQUALITY_METHODS: dict[str, Comparison] = {"assertEqual": "==", "assertEquals": "=="}
# Methods of unittest.TestCase that compare their first two arguments by an operator.
_COMPARING_METHODS: dict[str, Comparison] = {
    "assertListEqual": "==",
    "assertTupleEqual": "==",
    "assertDictEqual": "==",
    "assertSetEqual": "==",
    "assertMultiLineEqual": "==",
    "assertNotEqual": "!=",
    "assertIn": "in",
    "assertNotIn": "not in",
    "assertIs": "is",
    "assertIsNot": "is not",
    "assertLess": "<",
    "assertLessEqual": "<=",
    "assertGreater": ">",
    "assertGreaterEqual": ">=",
}
# Beginnings of the names of methods that check the calls of a mock.
_MOCK_METHODS = ("assert_any_", "assert_awaited", "assert_called", "assert_has_")
_TRUTH_METHODS = ("assertTrue", "assertFalse")
_METHODS_WITH_NONE: dict[str, Comparison] = {"assertIsNone": "is", "assertIsNotNone": "is not"}
# A `with` statement that calls one of these may leave its block early in a test that passes.
_LEAVING_CONTEXTS = ("raises", "assertRaises", "assertRaisesRegex", "suppress")

# Modules of the standard library that tests compute expected values with.
_COMPUTING_MODULES = {
    "cmath",
    "collections",
    "decimal",
    "difflib",
    "fractions",
    "functools",
    "itertools",
    "math",
    "numbers",
    "operator",
    "re",
    "statistics",
    "string",
}

# Number of the first site and of the first test. Patched code can see these numbers, so they are far
# from the values that tests are likely to expect.
FIRST_NUMBER = 7_000_001

_DISPLAY = ast.List | ast.Tuple | ast.Set | ast.Dict

_NO_LITERAL = object()
# Constants whose `repr` is no literal: the ellipsis, and infinity, which is written as 1e999.
_WITHOUT_LITERAL_REPR = (Ellipsis, math.inf, complex(0, math.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Comparison of a test's reported value with an expected value, made outside of the sandbox.

    Attributes:
        comparison: operator.
        expected: value that the test file states, or True for a comparison that the sandbox makes
            itself; None if it is the value of a parameter.
        parameter: name of the parameter that has the stated value, or "".
        stated_first: True if the stated value is the left operand.
    """

    comparison: Comparison
    expected: Any = None
    parameter: str = ""
    stated_first: bool = False


@dataclass(slots=True, kw_only=True)
class HiddenTest:
    """A test function of a file.

    Attributes:
        number: number of the function in its file, which its end reports.
        required_sites: numbers of sites that every complete run of the function reaches.
    """

    number: int
    required_sites: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithheldValue:
    """Value of a test's parameter.

    Attributes:
        parameter: name of the parameter.
        value: withheld value.
        test_id: text that pytest puts into the test's name for the value.
    """

    parameter: str
    value: Any
    test_id: str


@dataclass(slots=True, kw_only=True)
class HiddenTestFile:
    """A test file as it enters the sandbox, and the part of it that stays outside.

    Attributes:
        source: instrumented source.
        sites: comparisons by number.
        tests: test functions by qualified name, such as `TestAdd.test_one`. A name has several if the
            file defines it several times, for example in both branches of an `if`.
        withheld: withheld values of parameters by number.
        names: all names that the file may bind at module level; None if they are unknown.
        rebound_names: module-level names that functions of the file declare `global`.
        computing_modules: modules of the standard library with which the file may compute
            expected values.
    """

    source: str
    sites: dict[int, Site] = field(default_factory=dict)
    tests: dict[str, list[HiddenTest]] = field(default_factory=dict)
    withheld: dict[int, WithheldValue] = field(default_factory=dict)
    names: list[str] | None = None
    rebound_names: list[str] = field(default_factory=list)
    computing_modules: list[str] = field(default_factory=list)


def instrument(source: str) -> HiddenTestFile:
    """Return a test file with its expected values withheld.

    A source that is not Python of this version, is nested too deeply, or cannot be written out again
    exactly is returned as it is and has no tests.
    """
    file = None
    with suppress(SyntaxError, ValueError, RecursionError):
        file = _instrument_file(source)
    return file or HiddenTestFile(source=source)


def _instrument_file(source: str) -> HiddenTestFile | None:
    """Return an instrumented file; None if it cannot be written out exactly.

    Raises:
        SyntaxError: the source is not Python of this version.
        ValueError: it contains null bytes, or an integer that is too long to be written out.
        RecursionError: it is nested too deeply, such as a sum of hundreds of terms.
    """
    tree = ast.parse(source)
    file = HiddenTestFile(source=source)
    _describe_names(file, tree)
    trusted_names = _trusted_names(tree)
    comparing_methods = dict(_COMPARING_METHODS)
    if not _adds_equality_functions(tree):
        comparing_methods |= _EQUALITY_METHODS
    for number, (name, function) in enumerate(_test_functions(tree), start=FIRST_NUMBER):
        test = _instrument_test(
            file,
            function,
            number,
            trusted_names=trusted_names,
            comparing_methods=comparing_methods,
        )
        file.tests.setdefault(name, []).append(test)

    ast.fix_missing_locations(tree)
    text = ast.unparse(tree)
    if ast.dump(ast.parse(text)) != ast.dump(tree):
        return None
    file.source = f"{text}\n"
    return file


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _test_functions(tree: ast.Module) -> list[tuple[str, _Function]]:
    """Return the qualified name and the definition of each test function or method."""
    functions: list[tuple[str, _Function]] = []

    def collect(statements: Sequence[ast.stmt], prefix: str) -> None:
        for statement in statements:
            if isinstance(statement, ast.ClassDef):
                collect(statement.body, f"{prefix}{statement.name}.")
            elif isinstance(statement, _Function) and statement.name.startswith("test"):
                functions.append((f"{prefix}{statement.name}", statement))
            elif isinstance(statement, ast.If | ast.Try | ast.With):
                for block in _inner_blocks(statement):
                    collect(block, prefix)

    collect(tree.body, "")
    return functions


def _inner_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of a compound statement: its bodies, and those of its handlers or cases."""
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    parts = [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    return blocks + [part.body for part in parts]


def _instrument_test(
    file: HiddenTestFile,
    function: _Function,
    number: int,
    *,
    trusted_names: set[str],
    comparing_methods: Mapping[str, Comparison],
) -> HiddenTest:
    """Rewrite one test function in place, and add its sites to the file; return its description.

    A parameter can be withheld only if all of its uses are withheld. The function is rewritten with all
    candidates first; if one of them is still in use then, it is rewritten without that one.
    """
    parameters = _literal_parameters(function)
    original = copy.deepcopy(function)
    while True:
        rewriter = _TestRewriter(
            first_site=FIRST_NUMBER + len(file.sites),
            number=number,
            parameters=set(parameters),
            trusted_names=trusted_names,
            comparing_methods=comparing_methods,
        )
        function.body = rewriter.rewrite(function)
        in_use = _parameters_in_use(function, set(parameters))
        if not in_use:
            break
        parameters = {key: slots for key, slots in parameters.items() if key not in in_use}
        function.body = copy.deepcopy(original).body

    for parameter, slots in parameters.items():
        if parameter in rewriter.withheld_parameters:
            _withhold_parameter(file, parameter, slots)
    file.sites.update(rewriter.sites)
    return rewriter.test


def _parameters_in_use(function: _Function, parameters: set[str]) -> set[str]:
    """Return the parameters that a rewritten function still uses, other than as arguments of checks."""
    check_arguments = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _called_name(node) == CHECK:
            check_arguments.add(id(node.args[2]))

    in_use = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and id(node) not in check_arguments:
            in_use.add(node.id)
    return in_use & parameters


class _TestRewriter:
    """Rewriter of one test function."""

    def __init__(
        self,
        *,
        first_site: int,
        number: int,
        parameters: set[str],
        trusted_names: set[str],
        comparing_methods: Mapping[str, Comparison],
    ) -> None:
        """Initialize a rewriter.

        Args:
            first_site: number of the function's first site.
            number: number of the function.
            parameters: parameters of the function whose values can be withheld.
            trusted_names: names of objects that may rightly equal everything (see `_is_trusted`).
            comparing_methods: methods that compare their first two arguments by an operator.
        """
        self.sites: dict[int, Site] = {}
        self.test = HiddenTest(number=number)
        self.withheld_parameters: set[str] = set()
        self._first_site = first_site
        self._parameters = parameters
        self._trusted_names = trusted_names
        self._comparing_methods = comparing_methods

    def rewrite(self, function: _Function) -> list[ast.stmt]:
        """Return the rewritten body of a function, which reports its end."""
        body = self._rewrite_block(function.body, is_required=True)
        if isinstance(body[-1], ast.Return):
            return body  # the end is reported before every `return`
        return [*body, self._end_call()]

    def _rewrite_block(self, statements: list[ast.stmt], is_required: bool) -> list[ast.stmt]:
        """Return rewritten statements.

        Args:
            statements: statements of the block.
            is_required: True if every complete run of the test executes the whole block.
        """
        block: list[ast.stmt] = []
        for statement in statements:
            block += self._rewrite_statement(statement, is_required)
            is_required = is_required and not _may_leave(statement)
        return block

    def _rewrite_statement(self, statement: ast.stmt, is_required: bool) -> list[ast.stmt]:
        """Return the statements in place of one statement."""
        match statement:
            case ast.Return():
                return [self._end_call(), statement]
            case ast.Assert():
                return self._rewrite_assert(statement, is_required)
            case ast.Expr(value=ast.Call() as call):
                return [self._rewrite_call(call, is_required) or statement]
            case ast.With() | ast.AsyncWith() if _may_leave_context(statement):
                statement.body = self._rewrite_returns(statement.body)
            case ast.With() | ast.AsyncWith():
                statement.body = self._rewrite_block(statement.body, is_required)
            case ast.For():
                is_entered = is_required and _is_literal_sequence(statement.iter)
                statement.body = self._rewrite_block(statement.body, is_entered)
                statement.orelse = self._rewrite_block(statement.orelse, False)
            case ast.If() | ast.While() | ast.AsyncFor():
                if isinstance(statement, ast.If):
                    statement.test = self._guard_comparisons(statement.test)
                statement.body = self._rewrite_block(statement.body, False)
                statement.orelse = self._rewrite_block(statement.orelse, False)
            case ast.Try() | ast.TryStar():
                # An exception in the body is part of the test, so only the returns are rewritten.
                statement.body = self._rewrite_returns(statement.body)
                for handler in statement.handlers:
                    handler.body = self._rewrite_block(handler.body, False)
                statement.orelse = self._rewrite_block(statement.orelse, False)
                statement.finalbody = self._rewrite_block(statement.finalbody, False)
            case ast.Match():
                for branch in statement.cases:
                    branch.body = self._rewrite_block(branch.body, False)
            case _:
                pass
        return [statement]

    def _rewrite_returns(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Return statements that report the test's end before they return."""
        block: list[ast.stmt] = []
        for statement in statements:
            if isinstance(statement, ast.Return):
                block.append(self._end_call())
            if not isinstance(statement, _Function | ast.ClassDef):
                for inner_block in _inner_blocks(statement):
                    inner_block[:] = self._rewrite_returns(inner_block)
            block.append(statement)
        return block

    def _rewrite_assert(self, statement: ast.Assert, is_required: bool) -> list[ast.stmt]:
        """Return the statements in place of an assertion.

        A conjunction becomes an assertion of each part. A comparison with a stated value becomes a
        report of the other operand, which is compared outside of the sandbox. Another comparison is
        made in the sandbox, which reports it if it is true; a comparison by `is` or `is not` stays as
        it is. In other expressions, comparisons are guarded (see `_guard_comparisons`).
        """
        test = _simplify(statement.test)
        statement.test = test
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            statements: list[ast.stmt] = []
            for value in test.values:
                part = ast.Assert(value, copy.deepcopy(statement.msg))
                statements += self._rewrite_assert(part, is_required)
            return statements
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            statement.test = self._guard_comparisons(test)
            return [statement]

        comparison = _COMPARISONS[type(test.ops[0])]
        check = self._withhold(comparison, test.left, test.comparators[0], is_required)
        if check is not None:
            return [check]
        if comparison not in ("is", "is not"):
            site = self._add_site(Site(comparison="is", expected=True), is_required)
            statement.test = self._compare_call(site, comparison, test.left, test.comparators[0])
        return [statement]

    def _rewrite_call(self, call: ast.Call, is_required: bool) -> ast.stmt | None:
        """Rewrite a call such as `self.assertEqual(left, right)`.

        A comparison with a stated value becomes a report. Without a stated value, a call that checks
        equality stays, with operands that are also compared by `__operands__`: the call checks types
        too, as `assertListEqual` does. Other comparisons without a stated value become assertions. An
        argument of assertTrue or assertFalse is treated as a comparison if `_simplify` can make it
        one; otherwise the comparisons in it are guarded (see `_guard_comparisons`). The first two
        arguments of other methods, except those of mocks, are guarded by `__guard__`.

        Returns:
            Statement in place of the call; None if the call stays, perhaps with other arguments.
        """
        method = _called_name(call)
        has_star = any(isinstance(argument, ast.Starred) for argument in call.args)
        if has_star or not method.startswith("assert") or not call.args:
            return None
        if method in _METHODS_WITH_NONE:
            none = ast.Constant(None)
            return self._withhold(_METHODS_WITH_NONE[method], call.args[0], none, is_required)

        if method in _TRUTH_METHODS:
            value = call.args[0]
            is_true = method == "assertTrue"
            test = _simplify(value if is_true else ast.UnaryOp(ast.Not(), value))
            if isinstance(test, ast.Compare):
                return self._rewrite_assert(ast.Assert(test), is_required)[0]
            call.args[0] = self._guard_comparisons(value)
            return None

        if len(call.args) < 2:
            return None
        left, right, *others = call.args
        comparison = self._comparing_methods.get(method)
        if comparison is None:
            # Arguments of a mock's methods may rightly equal everything, as mock.ANY does.
            if not method.startswith(_MOCK_METHODS):
                call.args = [self._guard_operand(left), self._guard_operand(right), *others]
            return None

        check = self._withhold(comparison, left, right, is_required)
        if check is not None:
            return check
        if comparison == "==":
            site = self._add_site(Site(comparison="is", expected=True), is_required)
            operands = _call(OPERANDS, site, left, right, *self._trust_of(left, right))
            call.args = [ast.Starred(operands, ast.Load()), *others]
            return None
        test = ast.Compare(left, [_OPERATORS[comparison]()], [right])
        return self._rewrite_assert(ast.Assert(test), is_required)[0]

    def _guard_comparisons(self, expression: ast.expr) -> ast.expr:
        """Return an expression with calls of `__compare__` in place of its comparisons.

        `__compare__` counts equality, order and membership as false if an operand forges them, for
        example by an `__eq__` that is always true (see `_ComparisonGuard`).
        """
        guarded: ast.expr = _ComparisonGuard(self._compare_call).visit(expression)
        return guarded

    def _guard_operand(self, operand: ast.expr) -> ast.expr:
        """Return an operand with a guard against a value that claims to equal everything."""
        is_trusted = _is_trusted(operand, self._trusted_names)
        return operand if is_trusted else _call(GUARD, operand)

    def _compare_call(
        self, site: ast.expr, comparison: Comparison, left: ast.expr, right: ast.expr
    ) -> ast.expr:
        trust = self._trust_of(left, right)
        return _call(COMPARE, site, ast.Constant(comparison), left, right, *trust)

    def _trust_of(self, *operands: ast.expr) -> list[ast.expr]:
        """Return a constant for each operand: True if it is trusted (see `_is_trusted`)."""
        return [ast.Constant(_is_trusted(operand, self._trusted_names)) for operand in operands]

    def _withhold(
        self, comparison: Comparison, left: ast.expr, right: ast.expr, is_required: bool
    ) -> ast.stmt | None:
        """Return the statement that reports the computed operand of a comparison with a stated one.

        Returns:
            The statement; None if neither operand is stated, or both are literals, or if the operator
            is `is` or `is not` and the stated operand is not None, True or False.
        """
        for stated, computed in ((right, left), (left, right)):
            parameter_argument: ast.expr = ast.Constant(None)
            parameter = ""
            expected: Any = None
            if isinstance(stated, ast.Name) and stated.id in self._parameters:
                parameter = stated.id
                parameter_argument = stated
            else:
                expected = _literal(stated)
                if expected is _NO_LITERAL:
                    continue
            is_singleton = not parameter and (expected is None or isinstance(expected, bool))
            if comparison in ("is", "is not") and not is_singleton:
                continue
            if _literal(computed) is not _NO_LITERAL:
                continue

            site = Site(
                comparison=comparison,
                expected=expected,
                parameter=parameter,
                stated_first=stated is left,
            )
            if parameter:
                self.withheld_parameters.add(parameter)
            site_number = self._add_site(site, is_required)
            return ast.Expr(_call(CHECK, site_number, computed, parameter_argument))
        return None

    def _add_site(self, site: Site, is_required: bool) -> ast.expr:
        """Add a site; return its number as an expression."""
        number = self._first_site + len(self.sites)
        self.sites[number] = site
        if is_required:
            self.test.required_sites.append(number)
        return ast.Constant(number)

    def _end_call(self) -> ast.stmt:
        return ast.Expr(_call(END, ast.Constant(self.test.number)))


def _simplify(test: ast.expr) -> ast.expr:
    """Return `not a == b` as `a != b`, and `(a == b) is True` as `a == b`; other tests as they are."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Compare(ops=[operator]) as comparison):
            negation = _NEGATIONS.get(type(operator))
            if negation is not None:
                return ast.Compare(comparison.left, [negation()], comparison.comparators)
        case ast.Compare(
            left=ast.Compare() as comparison,
            ops=[ast.Is() | ast.Eq()],
            comparators=[ast.Constant(value=True)],
        ):
            return comparison
    return test


class _ComparisonGuard(ast.NodeTransformer):
    """Transformer that replaces each comparison of two operands by a call.

    Comparisons by `is` and `is not` stay, because operands cannot forge them. Chains such as
    `a < b < c` stay, too.
    """

    def __init__(
        self, compare_call: Callable[[ast.expr, Comparison, ast.expr, ast.expr], ast.expr]
    ) -> None:
        """Configure the transformer.

        Args:
            compare_call: returns the call for a site, an operator and two operands.
        """
        self._compare_call = compare_call

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) != 1 or isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        comparison = _COMPARISONS[type(node.ops[0])]
        no_site = ast.Constant(None)
        return self._compare_call(no_site, comparison, node.left, node.comparators[0])


def _is_trusted(operand: ast.expr, trusted_names: set[str]) -> bool:
    """Return True if an operand may rightly equal everything, because of an object of pytest or unittest.

    All names of a trusted expression are trusted, as in `mock.ANY`; of a list, tuple, set or dictionary,
    one of them is enough, as in `{"id": mock.ANY, "name": name}`.
    """
    names = {node.id for node in ast.walk(operand) if isinstance(node, ast.Name)}
    if isinstance(operand, _DISPLAY):
        return not names.isdisjoint(trusted_names)
    return bool(names) and names <= trusted_names


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), [*arguments], [])


def _called_name(call: ast.Call) -> str:
    """Return the last part of the name of a called function, or ""."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _may_leave(statement: ast.stmt) -> bool:
    """Return True if a statement may end its block early in a test that passes."""
    if isinstance(statement, _Function | ast.ClassDef):
        return False
    leaving = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(node, leaving) for node in ast.walk(statement))


def _may_leave_context(statement: ast.With | ast.AsyncWith) -> bool:
    """Return True if a `with` statement may leave its block early in a test that passes."""
    for item in statement.items:
        for node in ast.walk(item.context_expr):
            if isinstance(node, ast.Call) and _called_name(node) in _LEAVING_CONTEXTS:
                return True
    return False


def _is_literal_sequence(node: ast.expr) -> bool:
    """Return True if an expression is a list or tuple that is written out and not empty."""
    return isinstance(node, ast.List | ast.Tuple) and bool(node.elts)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal; `_NO_LITERAL` for any other expression.

    A literal that contains `...` or an infinite number also counts as another expression, because
    its `repr` could not be read in the sandbox (see `draw_candidates`).
    """
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _NO_LITERAL
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and part.value in _WITHOUT_LITERAL_REPR:
            return _NO_LITERAL
    return value


def _describe_names(file: HiddenTestFile, tree: ast.Module) -> None:
    """Set the fields of a file about its module-level names and its imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            file.rebound_names += node.names
    file.names = _bound_names(tree)
    file.computing_modules = sorted(_imported_modules(tree) & _COMPUTING_MODULES)


def _imported_modules(tree: ast.Module) -> set[str]:
    """Return the modules that a file imports, or imports names from, by absolute imports."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add(node.module or "")
    return modules


def _bound_names(tree: ast.Module) -> list[str] | None:
    """Return the names that a file may bind at module level; None for `from module import *`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, _Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            names.add(node.name or "")
        elif isinstance(node, ast.MatchMapping):
            names.add(node.rest or "")
    return None if "*" in names else sorted(names)


def _adds_equality_functions(tree: ast.Module) -> bool:
    """Return True if the file uses `addTypeEqualityFunc`, which changes how assertEqual compares a type."""
    attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return "addTypeEqualityFunc" in attributes


def _trusted_names(tree: ast.Module) -> set[str]:
    """Return the names imported from pytest and unittest, and those of containers with such a name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""] * len(node.names)
        else:
            continue
        for module, alias in zip(modules, node.names, strict=True):
            if module.partition(".")[0] in ("pytest", "unittest"):
                names.add(alias.asname or alias.name.partition(".")[0])

    containers: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, _DISPLAY):
            continue
        if _is_trusted(node.value, names):
            containers.update(part.id for part in node.targets if isinstance(part, ast.Name))
    return names | containers


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParameterSlot:
    """Position of a parameter's value in the list of a `parametrize` decorator.

    Attributes:
        container: elements of one parameter set or, for a single parameter, of the whole list.
        index: index of the value among the elements.
        position: position of the parameter set in the list.
    """

    container: list[ast.expr]
    index: int
    position: int


def _literal_parameters(function: _Function) -> dict[str, list[_ParameterSlot]]:
    """Return the slots of each parameter whose values can all be withheld, by parameter.

    A test with other arguments than parameters has none: its fixtures may take the parameters too.
    """
    parameters: dict[str, list[_ParameterSlot]] = {}
    parameter_names: set[str] = set()
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call) or _called_name(decorator) != "parametrize":
            continue
        if len(decorator.args) != 2 or decorator.keywords:
            continue
        names = _parameter_names(decorator.args[0])
        parameter_names.update(names)
        value_sets = decorator.args[1]
        if not isinstance(value_sets, ast.List | ast.Tuple) or not value_sets.elts:
            continue
        # If two parameter sets have the same id, pytest appends numbers to their ids. `_test_id` does
        # not know these numbers, so such a list is left as it is.
        if not _have_different_ids(value_sets.elts):
            continue
        for index, name in enumerate(names):
            slots = _parameter_slots(value_sets.elts, index, is_only_parameter=len(names) == 1)
            if len(slots) == len(value_sets.elts) and _can_withhold(slots):
                parameters[name] = slots
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    return parameters if arguments <= {"self", *parameter_names} else {}


def _parameter_slots(
    value_sets: list[ast.expr], index: int, *, is_only_parameter: bool
) -> list[_ParameterSlot]:
    """Return the slots of a parameter; a parameter set that is not a list or tuple has none.

    Args:
        value_sets: elements of the decorator's list.
        index: index of the parameter among the decorator's names.
        is_only_parameter: True if the elements are the values themselves, and not sets of values.
    """
    slots = []
    for position, value_set in enumerate(value_sets):
        if is_only_parameter:
            slot = _ParameterSlot(container=value_sets, index=position, position=position)
            slots.append(slot)
        elif isinstance(value_set, ast.List | ast.Tuple):
            slot = _ParameterSlot(container=value_set.elts, index=index, position=position)
            slots.append(slot)
    return slots


def _have_different_ids(value_sets: list[ast.expr]) -> bool:
    """Return True if pytest surely gives all parameter sets different ids.

    The id of a value that is not a literal is unknown: that of the class `int` is "int". At a position
    with such a value, all values count as equal.
    """
    unknown_positions: set[int] = set()
    text_sets: list[list[str]] = []
    for value_set in value_sets:
        elements = value_set.elts if isinstance(value_set, ast.List | ast.Tuple) else [value_set]
        texts = []
        for position, element in enumerate(elements):
            value = _literal(element)
            if value is _NO_LITERAL:
                unknown_positions.add(position)
            # pytest gives b"abc" the same id as "abc".
            texts.append(value.decode("latin-1") if isinstance(value, bytes) else str(value))
        text_sets.append(texts)

    ids = set()
    for texts in text_sets:
        for position in unknown_positions.intersection(range(len(texts))):
            texts[position] = ""
        ids.add("-".join(texts))
    return len(ids) == len(value_sets)


def _parameter_names(node: ast.expr) -> list[str]:
    """Return the names in the first argument of `parametrize`; [] if it is no literal of names."""
    names = _literal(node)
    if isinstance(names, str):
        return [name.strip() for name in names.split(",") if name.strip()]
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return list(names)
    return []


def _can_withhold(slots: Sequence[_ParameterSlot]) -> bool:
    """Return True if every slot holds a literal, and `_test_id` knows the id that pytest gives it."""
    for slot in slots:
        if slot.index >= len(slot.container):
            return False
        value = _literal(slot.container[slot.index])
        if value is _NO_LITERAL or _test_id("", value, 0) is None:
            return False
    return True


def _withhold_parameter(
    file: HiddenTestFile, parameter: str, slots: Sequence[_ParameterSlot]
) -> None:
    """Replace the values of a parameter by calls of `__withheld__`."""
    for slot in slots:
        number = len(file.withheld)
        value = _literal(slot.container[slot.index])
        file.withheld[number] = WithheldValue(
            parameter=parameter,
            value=value,
            test_id=_test_id(parameter, value, slot.position) or "",
        )
        slot.container[slot.index] = _call(WITHHELD, ast.Constant(number))


def _test_id(parameter: str, value: Any, position: int) -> str | None:
    """Return the text that pytest puts into a test's name for a value; None if it is unknown."""
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() and "\\" not in value else None
    if value is None or isinstance(value, bool | int | float | complex):
        return str(value)
    if isinstance(value, list | tuple | dict | set):
        return f"{parameter}{position}"
    return None
