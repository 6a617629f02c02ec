"""A small OpenAI-compatible server that streams what it is told to, on a thread."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ScriptedOpenAI:
    """What the server answers, and what it was asked."""

    url: str = ""
    status: int = 200
    deltas: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "assistant", "content": ""}, {"content": "Well"}]
    )
    error: str | None = None
    """Sent as an event after the deltas."""
    headers: Mapping[str, str] = field(default_factory=dict)
    chars_per_token: float = 3.0
    usage: Mapping[str, Any] = field(default_factory=dict)
    """Told with the number of tokens."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked_headers: list[dict[str, str]] = field(default_factory=list)

    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies]

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for delta in self.deltas:
            yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        if self.error is not None:
            yield {"error": {"message": self.error}}
            return
        tokens = round(len(body["messages"][0]["content"]) / self.chars_per_token)
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, **self.usage}
        yield {"choices": [], "usage": usage}


@contextmanager
def scripted_openai(script: ScriptedOpenAI) -> Iterator[ScriptedOpenAI]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send_json(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            script.bodies.append(body)
            script.asked_headers.append({k.lower(): v for k, v in self.headers.items()})
            if script.status != 200:
                self._send_json(script.status, {"error": {"message": "no room", "type": "x"}})
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            for name, value in script.headers.items():
                self.send_header(name, value)
            self.end_headers()
            for event in script.events(body):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def _send_json(self, status: int, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
