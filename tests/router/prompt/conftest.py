"""What tests of prompts share.

One oracle serves all comparisons with vLLM: importing vLLM takes most of their time.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.router.prompt.chat_shapes import TEMPLATES
from tests.router.prompt.oracle import Oracle
from tests.router.prompt.tokenizer_makers import llama3, write_model


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    running = Oracle()
    yield running
    running.close()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", llama3(), TEMPLATES["parts"])


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The same tokenizer, and another chat template."""
    return write_model(tmp_path / "other", llama3(), TEMPLATES["chatml"])
