"""One request from its acceptance to the last byte of its answer; `Proxy.handle` is the start."""

from router.proxy.first_byte_waits import FirstByteWaits
from router.proxy.lifecycle import RequestLifecycle
from router.proxy.parsed_request import ParsedRequest, json_object, parse
from router.proxy.passing import METHODS, check_passes, keeps, label, passed
from router.proxy.proxy import Proxy
from router.proxy.relay import UsageReader
from router.proxy.retries import Retries
from router.proxy.upstream import RETRYABLE, client_session

__all__ = [
    "METHODS",
    "RETRYABLE",
    "FirstByteWaits",
    "ParsedRequest",
    "Proxy",
    "RequestLifecycle",
    "Retries",
    "UsageReader",
    "check_passes",
    "client_session",
    "json_object",
    "keeps",
    "label",
    "parse",
    "passed",
]
