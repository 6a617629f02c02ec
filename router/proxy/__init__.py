"""One request from its acceptance to the last byte of its answer; `Proxy.handle` is the start."""

from router.proxy.first_byte_waits import FirstByteWaits
from router.proxy.lifecycle import RequestLifecycle
from router.proxy.proxy import Proxy
from router.proxy.relay import UsageReader
from router.proxy.retries import Retries
from router.proxy.upstream import RETRYABLE, client_session

__all__ = [
    "RETRYABLE",
    "FirstByteWaits",
    "Proxy",
    "RequestLifecycle",
    "Retries",
    "UsageReader",
    "client_session",
]
