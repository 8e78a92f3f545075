"""Instrumentation of hidden tests: expected values stay outside, and tests behave as before."""

from __future__ import annotations

from rollout.environments.hidden_tests import FIRST_NUMBER, HiddenTestFile, Site, instrument


def instrumented(body: str, header: str = "") -> HiddenTestFile:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return instrument(f"{header}def test_one():\n{lines}\n")


def test_a_literal_leaves_the_file() -> None:
    file = instrumented("assert add(2, 3) == 577\nassert 'secret' in text(1)")
    assert "577" not in file.source and "secret" not in file.source
    assert f"__check__({FIRST_NUMBER}, add(2, 3), None)" in file.source
    assert list(file.sites.values()) == [
        Site(comparison="==", expected=577),
        Site(comparison="in", expected="secret", stated_first=True),
    ]
    [test] = file.tests["test_one"]
    assert test.required_sites == list(file.sites)


def test_values_with_a_name_stay_in_the_file() -> None:
    header = "pytest_plugins = 'pytester'\nTABLE = {'k': 578}\n"
    file = instrumented("expected = [577]\nassert f(1) == expected\nassert f(2) == TABLE", header)
    assert file.source.startswith(header) and "expected = [577]" in file.source
    assert [site.expected for site in file.sites.values()] == [True, True]


def test_parameters_that_a_fixture_may_take_are_not_withheld() -> None:
    source = (
        "@pytest.mark.parametrize('mode', ['one', 'two'])\n"
        "def test_one({arguments}):\n    assert f(1) == mode\n"
    )
    assert len(instrument(source.format(arguments="self, mode")).withheld) == 2
    assert instrument(source.format(arguments="client, mode")).withheld == {}


def test_parameters_are_withheld_and_keep_their_names() -> None:
    source = (
        "import pytest\n\n"
        "@pytest.mark.parametrize('given, expected', [(1, 577), (2, None), (3, [578])])\n"
        "def test_one(given, expected):\n    assert f(given) == expected\n"
    )
    file = instrument(source)
    assert "577" not in file.source and "578" not in file.source
    assert [value.test_id for value in file.withheld.values()] == ["577", "None", "expected2"]
    assert list(file.sites.values()) == [Site(comparison="==", parameter="expected")]


def test_parameters_that_pytest_would_number_are_not_withheld() -> None:
    source = (
        "@pytest.mark.parametrize('given, expected', [(1, 577), (1, 577)])\n"
        "def test_one(given, expected):\n    assert f(given) == expected\n"
    )
    assert instrument(source).withheld == {}


def test_bytes_and_text_that_pytest_gives_one_id_are_not_withheld() -> None:
    # pytest names these tests test_one[abc-577_0] and test_one[abc-577_1].
    source = (
        "@pytest.mark.parametrize('given, expected', [('abc', 577), (b'abc', 577)])\n"
        "def test_one(given, expected):\n    assert f(given) == expected\n"
    )
    assert instrument(source).withheld == {}


def test_a_class_and_its_name_that_pytest_gives_one_id_are_not_withheld() -> None:
    # pytest names these tests test_one[int-577_0] and test_one[int-577_1].
    source = (
        "@pytest.mark.parametrize('kind, expected', [('int', 577), (int, 577)])\n"
        "def test_one(kind, expected):\n    assert f(kind) == expected\n"
    )
    assert instrument(source).withheld == {}
    assert len(instrument(source.replace("(int, 577)", "(int, 578)")).withheld) == 2


def test_methods_of_unittest_are_withheld() -> None:
    source = (
        "class TestOne(TestCase):\n    def test_two(self):\n"
        "        self.assertEqual(f(1), 577)\n        self.assertIsNone(f(2))\n"
        "        self.assertEqual(f(3), f(4), 'message')\n"
    )
    file = instrument(source)
    assert "577" not in file.source
    operands = f"*__operands__({FIRST_NUMBER + 2}, f(3), f(4), False, False)"
    assert f"self.assertEqual({operands}, 'message')" in file.source
    [test] = file.tests["TestOne.test_two"]
    assert test.required_sites == list(file.sites)


def test_assert_equal_stays_if_the_test_case_adds_equality_functions() -> None:
    source = (
        "class TestOne(TestCase):\n"
        "    def setUp(self):\n        self.addTypeEqualityFunc(str, self.same)\n"
        "    def test_two(self):\n"
        "        self.assertEqual(f(1), 'a  b')\n        self.assertIn(f(2), (577,))\n"
    )
    file = instrument(source)
    assert "self.assertEqual(__guard__(f(1)), __guard__('a  b'))" in file.source
    assert [site.expected for site in file.sites.values()] == [(577,)]


def test_computed_operands_of_unittest_are_compared_as_those_of_assert() -> None:
    file = instrumented("self.assertIn(f(1), g(2), 'message')\nself.assertIs(f(3), g(4))")
    assert f"assert __compare__({FIRST_NUMBER}, 'in', f(1), g(2), False, False)" in file.source
    assert "assert f(3) is g(4)" in file.source


def test_a_site_is_required_only_if_every_complete_run_reaches_it() -> None:
    file = instrumented(
        "for i in (1, 2):\n    assert f(i) == 1\n"
        "for i in items:\n    assert f(i) == 2\n"
        "if condition:\n    return\n"
        "assert f(0) == 3"
    )
    [test] = file.tests["test_one"]
    assert [file.sites[number].expected for number in test.required_sites] == [1]
    assert file.source.count(f"__end__({FIRST_NUMBER})") == 2


def test_a_conjunction_and_a_negation_are_withheld_too() -> None:
    file = instrumented(
        "assert f(1) == 577 and f(2) is None\nassert not f(3) == 578\n"
        "assert (f(4) == 579) is True\nself.assertFalse(f(5) in (580, 581))"
    )
    assert all(str(number) not in file.source for number in range(577, 582))
    comparisons = [site.comparison for site in file.sites.values()]
    assert comparisons == ["==", "is", "!=", "==", "not in"]


def test_an_operand_of_pytest_is_trusted() -> None:
    file = instrumented("assert f(1) == pytest.approx(g(2))", "import pytest\n")
    assert "pytest.approx(g(2)), False, False)" in file.source
    file = instrumented("assert f(1) == mock.ANY", "from unittest import mock\n")
    assert "mock.ANY, False, True)" in file.source
    body = "expected = {'id': mock.ANY, 'name': g(2)}\nassert f(1) == expected"
    file = instrumented(body, "from unittest import mock\n")
    assert "f(1), expected, False, True)" in file.source


def test_operands_that_may_equal_everything_are_not_guarded() -> None:
    header = "from unittest import mock\nANY = mock.ANY\n"
    file = instrumented("callback.assert_called_once_with(ANY, f(1))", header)
    assert "callback.assert_called_once_with(ANY, f(1))" in file.source
    file = instrumented("self.assert_logged(mock.ANY, f(1))\nself.assert_near(f(2), g(3))", header)
    assert "self.assert_logged(mock.ANY, __guard__(f(1)))" in file.source
    assert "self.assert_near(__guard__(f(2)), __guard__(g(3)))" in file.source


def test_an_assertion_that_must_fail_is_left_as_it_is() -> None:
    body = "with pytest.raises(AssertionError):\n    assert f(1) == 577"
    file = instrumented(body)
    assert "assert f(1) == 577" in file.source
    assert file.sites == {}


def test_ellipsis_and_infinity_are_compared_in_the_sandbox() -> None:
    file = instrumented("assert f(1) == (5, ...)\nassert f(2) == [1e999]\nassert f(3) == 578")
    assert [site.expected for site in file.sites.values()] == [True, True, 578]
    assert "(5, ...)" in file.source


def test_a_source_that_is_no_python_stays_as_it_is() -> None:
    assert instrument("print 'old'\n") == HiddenTestFile(source="print 'old'\n")


def test_every_definition_of_a_test_has_its_own_number() -> None:
    source = (
        "if condition:\n    def test_one():\n        assert f(1) == 577\n"
        "else:\n    def test_one():\n        assert f(1) == 578\n"
        "def test_two():\n    assert f(2) == 579\n"
    )
    tests = instrument(source).tests
    assert [test.number - FIRST_NUMBER for test in tests["test_one"]] == [0, 1]
    assert [test.number - FIRST_NUMBER for test in tests["test_two"]] == [2]


def test_returns_in_handlers_and_cases_report_the_end() -> None:
    nested = (
        "try:\n    try:\n        f(1)\n    except ValueError:\n        return\nfinally:\n    g()\n"
        "match f(2):\n    case 3:\n        return"
    )
    assert instrumented(nested).source.count(f"__end__({FIRST_NUMBER})") == 3


def test_a_file_that_is_nested_too_deeply_stays_as_it_is() -> None:
    source = f"def test_one():\n    assert f() == {' + '.join(['1'] * 800)}\n"
    assert instrument(source) == HiddenTestFile(source=source)
