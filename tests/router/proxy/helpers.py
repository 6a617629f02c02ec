"""What tests here share."""

from typing import Any

import openai

from tests.router.conftest import Running

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def openai_client(router: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="mine", max_retries=0)
