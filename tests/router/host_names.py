"""Host names as a test needs them, whatever this machine's resolver answers and how slowly."""

import socket
from collections.abc import Mapping
from typing import Any

import pytest


def resolve_hosts(monkeypatch: pytest.MonkeyPatch, hosts: Mapping[str, str | None]) -> None:
    """Have names resolve to one address each, or be unknown where that is None."""
    ask = socket.getaddrinfo

    def answer(host: Any, *more: Any, **kinds: Any) -> Any:
        if host in hosts:
            host = hosts[host]
            if host is None:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask(host, *more, **kinds)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
