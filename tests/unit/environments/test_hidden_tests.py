"""Instrumentation of hidden tests: expected values stay outside, and tests behave as before."""

from __future__ import annotations

from rollout.environments.hidden_tests import HiddenTestFile, Site, instrument


def instrumented(body: str, header: str = "") -> HiddenTestFile:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return instrument(f"{header}def test_one():\n{lines}\n")


def test_a_literal_leaves_the_file() -> None:
    file = instrumented("assert add(2, 3) == 577\nassert 'secret' in text(1)")
    assert "577" not in file.source and "secret" not in file.source
    assert "__check__(0, add(2, 3), None)" in file.source
    assert file.sites == {
        0: Site(comparison="==", expected=577),
        1: Site(comparison="in", expected="secret", stated_first=True),
    }
    assert file.tests["test_one"].required_sites == [0, 1]


def test_local_and_global_names_of_literals_leave_the_file() -> None:
    file = instrumented(
        "expected = [577]\nassert f(1) == expected\nassert f(2) == TABLE", "TABLE = {'k': 578}\n"
    )
    assert "577" not in file.source and "578" not in file.source
    assert [site.expected for site in file.sites.values()] == [[577], {"k": 578}]


def test_a_name_that_is_used_otherwise_keeps_its_value() -> None:
    file = instrumented("expected = [577]\nexpected.append(1)\nassert f(1) == expected")
    assert "[577]" in file.source
    assert [site.expected for site in file.sites.values()] == [True]


def test_parameters_are_withheld_and_keep_their_names() -> None:
    source = (
        "import pytest\n\n"
        "@pytest.mark.parametrize('given, expected', [(1, 577), (2, None), (3, [578])])\n"
        "def test_one(given, expected):\n    assert f(given) == expected\n"
    )
    file = instrument(source)
    assert "577" not in file.source and "578" not in file.source
    assert [value.test_id for value in file.withheld.values()] == ["577", "None", "expected2"]
    assert file.sites == {0: Site(comparison="==", parameter="expected")}


def test_parameters_that_pytest_would_number_are_not_withheld() -> None:
    source = (
        "@pytest.mark.parametrize('given, expected', [(1, 577), (1, 577)])\n"
        "def test_one(given, expected):\n    assert f(given) == expected\n"
    )
    assert instrument(source).withheld == {}


def test_methods_of_unittest_are_withheld() -> None:
    source = (
        "class TestOne(TestCase):\n    def test_two(self):\n"
        "        self.assertEqual(f(1), 577)\n        self.assertIsNone(f(2))\n"
        "        self.assertEqual(f(3), f(4), 'message')\n"
    )
    file = instrument(source)
    assert "577" not in file.source
    assert "self.assertEqual(*__operands__(2, f(3), f(4), False, False), 'message')" in file.source
    assert file.tests["TestOne.test_two"].required_sites == [0, 1, 2]


def test_a_site_is_required_only_if_every_complete_run_reaches_it() -> None:
    file = instrumented(
        "for i in (1, 2):\n    assert f(i) == 1\n"
        "for i in items:\n    assert f(i) == 2\n"
        "if condition:\n    return\n"
        "assert f(0) == 3"
    )
    required = [file.sites[number].expected for number in file.tests["test_one"].required_sites]
    assert required == [1]
    assert file.source.count("__end__(0)") == 2


def test_an_assertion_that_must_fail_is_left_as_it_is() -> None:
    body = "with pytest.raises(AssertionError):\n    assert f(1) == 577"
    file = instrumented(body)
    assert "assert f(1) == 577" in file.source
    assert file.sites == {}


def test_a_mutable_default_or_an_alias_is_no_constant() -> None:
    file = instrumented("helper(TABLE)\nassert f(2) == TABLE", "TABLE = {'k': 578}\n")
    assert file.constants == {}
    assert "578" in file.source


def test_a_source_that_is_no_python_stays_as_it_is() -> None:
    assert instrument("print 'old'\n") == HiddenTestFile(source="print 'old'\n")
