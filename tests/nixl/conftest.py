"""Two stock vLLM servers with NixlConnector, started once: that takes most of the time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.nixl.environment import path
from bench.nixl.server import NixlServer, started_pair
from bench.replica.model import make_model
from router.launch.processes import ProcessGroup
from tests.nixl.routed import MODEL

MAX_MODEL_TOKENS = 8192
LEASE_S = 6


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("nixl-model") / "small")


@pytest.fixture(scope="session")
def servers(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, NixlServer]]:
    """``one`` and ``two``, which pull from each other."""
    if (nixl := path()) is None:
        pytest.skip("NIXL is not there: make test-nixl installs it")
    directory = tmp_path_factory.mktemp("nixl")
    with ProcessGroup() as group:
        yield started_pair(
            group,
            nixl=nixl,
            model=model_dir,
            served_name=MODEL,
            directory=directory,
            max_model_tokens=MAX_MODEL_TOKENS,
            lease_s=LEASE_S,
        )
