"""Reading the body of a request, within its limit."""

from aiohttp import web

from router.config import BadRequest, TooLarge


async def read_body(request: web.Request, limit_bytes: int) -> bytes:
    """Return the body; raise `TooLarge` as soon as it is known to be over the limit."""
    announced = request.content_length
    if announced is not None and announced > limit_bytes:
        raise _too_large(limit_bytes, f"{announced} bytes were announced")
    chunks, size = [], 0
    try:
        # Not by request.read(): that keeps the body as long as the request.
        while chunk := await request.content.readany():
            size += len(chunk)
            if size > limit_bytes:
                raise _too_large(limit_bytes, "more was sent")
            chunks.append(chunk)
    except web.RequestPayloadError:
        raise BadRequest(
            "the body is not encoded as its Content-Encoding and Transfer-Encoding say"
        ) from None
    return b"".join(chunks)


def _too_large(limit_bytes: int, what: str) -> TooLarge:
    return TooLarge(
        f"the body may have {limit_bytes} bytes and {what} "
        "(max_body_bytes in the router's configuration)"
    )
