"""One router and its replicas for all tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.servers import Fleet, fleet


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def router(directory: Path) -> Iterator[Fleet]:
    with fleet(directory) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """At a test's end nothing is in flight at its router, whose log is clean."""
    yield
    if "router" in request.fixturenames:
        request.getfixturevalue("router").check()
