"""vLLM's own tokens of a request, asked of its rendering application."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_RENDERED = {
    "/tokenize": "/tokenize",
    "/v1/chat/completions": "/v1/chat/completions/render",
    "/v1/completions": "/v1/completions/render",
    "/v1/responses": "/v1/responses/render",
    "/v1/messages": "/v1/messages/render",
}


class Oracle:
    """vLLM's rendering application, in a process of its own."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        script = Path(__file__).with_name("vllm_oracle.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    def tokens(
        self, model: Path, endpoint: str, body: dict[str, Any], args: tuple[str, ...] = ()
    ) -> list[int] | None:
        """Return the replica's tokens, or None if it refuses the request."""
        whole = {"model": str(model), "max_tokens": 1, **body}
        if endpoint == "/tokenize":
            whole.pop("max_tokens")
        if endpoint == "/v1/responses":
            whole["max_output_tokens"] = whole.pop("max_tokens")
        answer = self.ask(model, _RENDERED[endpoint], whole, args)
        if answer["status"] != 200:
            # An empty prompt has no tokens to answer with; everything else is refused.
            return [] if "No token_ids rendered" in json.dumps(answer) else None
        found = answer["body"]
        if isinstance(found, list):
            found = found[0]
        tokens: list[int] = found["tokens"] if endpoint == "/tokenize" else found["token_ids"]
        return tokens

    def ask(
        self, model: Path, path: str, body: dict[str, Any], args: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Return the application's answer: ``status`` and ``body``."""
        request = {"model": str(model), "path": path, "body": body, "args": args}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
