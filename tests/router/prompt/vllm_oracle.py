"""vLLM's own rendering and tokenizing, without an engine, as a subprocess.

Reads one JSON object a line, ``{"model": DIRECTORY, "path": "/tokenize", "body": {...}}``,
and answers each with ``{"status": 200, "body": {...}}``. It is the application
that vLLM serves for rendering only: the same code as a replica's, without a
model to load. ``args`` of a request are further command-line arguments.
"""

import asyncio
import json
import logging
import sys
from typing import Any

import httpx
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.render.app_state import init_render_app_state
from vllm.utils.argparse_utils import FlexibleArgumentParser


async def client_for(model: str, extra: list[str]) -> httpx.AsyncClient:
    """Return a client of the rendering application for one model."""
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", model, "--dtype", "bfloat16", *extra])
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = VllmConfig(model_config=engine_args.create_model_config())
    app = build_app(args, ("render",))
    await init_render_app_state(config, app.state, args)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://oracle")


async def main() -> None:
    """Answer requests until the input ends."""
    logging.disable(logging.CRITICAL)
    clients: dict[str, httpx.AsyncClient] = {}
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever vLLM prints must not get between the answers
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        extra = request.get("args", [])
        name = json.dumps([request["model"], extra])
        if name not in clients:
            clients[name] = await client_for(request["model"], extra)
        response = await clients[name].post(request["path"], json=request["body"], timeout=60)
        try:
            body = response.json()
        except ValueError:
            body = response.text
        answers.write(json.dumps({"status": response.status_code, "body": body}) + "\n")
        answers.flush()


asyncio.run(main())
