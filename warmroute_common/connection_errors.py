"""Why a server cannot be reached, as one sentence for logs and findings."""

import errno
import socket
from urllib.parse import urlsplit

import aiohttp

from warmroute_common.addresses import join_host_port
from warmroute_common.config_reader import describe


def connection_problem(error: BaseException, url: str) -> str:
    """Return why the server at ``url`` did not answer; ``error`` is from aiohttp or a socket."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    where = join_host_port(parts.hostname or "", port)
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            problem = f"the certificate of {where} is not accepted ({describe(error)})"
        case aiohttp.ClientConnectorDNSError() | socket.gaierror():
            problem = f"the host name '{parts.hostname}' cannot be resolved (DNS)"
        case aiohttp.ClientConnectorError():
            problem = connection_problem(error.os_error, url)
        case aiohttp.ServerDisconnectedError():
            problem = f"{where} accepts the connection and closes it without an answer"
        case OSError() if _is(error, errno.ECONNREFUSED):
            problem = f"nothing listens at {where} (connection refused)"
        case OSError() if _is(error, errno.EHOSTUNREACH, errno.ENETUNREACH):
            problem = f"{where} cannot be reached from here (no route)"
        case _:
            problem = f"{where}: {describe(error)}"
    return problem


def is_exhausted(error: BaseException) -> bool:
    """Whether this machine had no file descriptor or memory left for a connection."""
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    own = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
    return isinstance(error, OSError) and _is(error, *own)


def is_unresolved(error: BaseException) -> bool:
    """Whether the server's host name could not be resolved."""
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    return isinstance(error, socket.gaierror | aiohttp.ClientConnectorDNSError)


def _is(error: OSError, *numbers: int) -> bool:
    if error.errno is not None:
        return error.errno in numbers
    # If a name has several addresses, asyncio raises one error with the texts of all.
    return any(f"[Errno {each}]" in str(error) for each in numbers)
