"""The least that a picker in Python does: one answer for all, by gRPC and by HTTP.

What asks it and what it says are as with ours, and it hears the same log; it reads nothing and
judges nothing. What ours costs above it is the judgment, and how it is asked.
"""

import argparse
import gc
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import grpc
import uvloop
from aiohttp import web
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsResponse
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from router.envoy import DESTINATION, EXCHANGE, LB_METADATA, MAX_RETRIES, REPLICAS

_HOST: Final = "127.0.0.1"
_TOLD: Final = {
    "x-request-id": "0" * 32,
    **{f"x-warmroute-{name}": "0" for name in ("replica", "reason", "prompt-tokens", "retries")},
    **{f"x-warmroute-{name}-ms": "0.0" for name in ("predicted-ttft", "held")},
    **{f"x-warmroute-matched-{name}": "0" for name in ("gpu", "cpu", "disk", "remote")},
}


def by_http(endpoint: str) -> dict[str, str]:
    """Return the headers of an answer to our Envoy."""
    words = {DESTINATION: endpoint, MAX_RETRIES: "0", EXCHANGE: "0-0", REPLICAS: "one"}
    return words | _TOLD


def by_grpc(endpoint: str) -> bytes:
    """Return the message that answers a gateway which has sent a body."""
    answer = ProcessingResponse()
    common = answer.request_body.response
    common.header_mutation.set_headers.append(
        HeaderValueOption(
            header=HeaderValue(key=DESTINATION, raw_value=endpoint.encode()),
            append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
    )
    common.clear_route_cache = True
    answer.dynamic_metadata.update({LB_METADATA: {DESTINATION: endpoint}})
    return bytes(answer.SerializeToString())


async def serve(port: int, envoy_port: int, endpoint: str) -> None:
    """Answer until this is cancelled."""
    message, headers = by_grpc(endpoint), by_http(endpoint)

    async def process(_: object, context: Any) -> None:
        await context.read()
        await context.write(message)
        await context.read()  # None at the end of the request

    async def hear(messages: AsyncIterator[bytes], _: object) -> bytes:
        async for _ in messages:
            pass
        return bytes(StreamAccessLogsResponse().SerializeToString())

    async def answer(request: web.BaseRequest) -> web.Response:
        await request.content.read()
        return web.Response(headers=headers)

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add(server, "ext_proc.v3.ExternalProcessor", {"Process": both_ways(process)})
    log = grpc.stream_unary_rpc_method_handler(hear)
    add(server, "accesslog.v3.AccessLogService", {"StreamAccessLogs": log})
    server.add_insecure_port(f"{_HOST}:{port}")
    await server.start()
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, _HOST, envoy_port).start()
    gc.freeze()
    await server.wait_for_termination()


def both_ways(process: Any) -> Any:
    """Return a handler of bytes, in and out: no message is made of them."""
    return grpc.stream_stream_rpc_method_handler(process)


def add(server: Any, service: str, methods: Mapping[str, Any]) -> None:
    """Serve a service of Envoy's."""
    handler = grpc.method_handlers_generic_handler(f"envoy.service.{service}", methods)
    server.add_generic_rpc_handlers([handler])


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="bench.overhead.bare_picker")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--envoy-port", type=int, required=True)
    parser.add_argument("endpoint")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.envoy_port, arguments.endpoint))


if __name__ == "__main__":
    main()
