"""The least that a picker in Python does: it reads each question and gives one answer to all.

Ours costs more than this by reading, placing and accounting for the request.
"""

import argparse
import gc
from collections.abc import Mapping
from typing import Any, Final

import grpc
import uvloop
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from router.gateway.envoy_config import DESTINATION, LB_METADATA

_HOST: Final = "127.0.0.1"


def answer_to_body(endpoint: str) -> bytes:
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


async def serve(port: int, endpoint: str) -> None:
    """Answer until this is cancelled."""
    message = answer_to_body(endpoint)

    async def process(_: object, context: Any) -> None:
        await context.read()
        await context.write(message)
        await context.read()  # None at the end of the request

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    # Bytes in and out: no message objects are made.
    handler = grpc.stream_stream_rpc_method_handler(process)
    add(server, "ext_proc.v3.ExternalProcessor", {"Process": handler})
    server.add_insecure_port(f"{_HOST}:{port}")
    await server.start()
    gc.freeze()
    await server.wait_for_termination()


def add(server: Any, service: str, methods: Mapping[str, Any]) -> None:
    """Serve a service of Envoy's."""
    handler = grpc.method_handlers_generic_handler(f"envoy.service.{service}", methods)
    server.add_generic_rpc_handlers([handler])


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="bench.overhead.bare_picker")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("endpoint")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.endpoint))


if __name__ == "__main__":
    main()
