"""Real servers for all contract tests: each keeps its blobs under names of its own."""

from collections.abc import Iterator

import pytest

from tests.mooncake_master import running_master
from tests.servers import redis_program, running, valkey_program


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(redis_program(), tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(valkey_program(), tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest.fixture(scope="session")
def mooncake_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_master(tmp_path_factory.mktemp("mooncake")) as master:
        yield master.url
