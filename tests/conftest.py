"""Property tests draw the same examples every time, and no example has a deadline on a busy machine."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sglang", help="interpreter of SGLang's environment, or the URL of a server, to test against")


@pytest.fixture(scope="session")
def sglang_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One engine on the server that --sglang starts or names, for all tests: starting it takes minutes on a CPU."""
    given = request.config.getoption("--sglang")
    if not given:
        pytest.skip("needs --sglang; `make test-sglang` sets it up")
    from tests.support.sglang_server import make_engine

    engine = make_engine(given, tmp_path_factory.mktemp("sglang"))
    yield engine
    engine.close()
