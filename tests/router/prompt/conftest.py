"""One oracle for all comparisons with vLLM: importing vLLM takes most of their time."""

from collections.abc import Iterator

import pytest

from tests.router.prompt.oracle import Oracle


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    running = Oracle()
    yield running
    running.close()
