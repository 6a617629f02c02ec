"""Asking a running router for what its commands show."""

import json
import urllib.error
import urllib.request
from typing import Any, Final

import click

_WITHIN_S: Final = 30.0


class NoAnswerError(click.ClickException):
    """The router cannot be asked."""


class Refused(click.ClickException):
    """The router answers, but not this."""


def answer_of(
    url: str,
    path: str,
    body: bytes | None = None,
    *,
    key: str | None,
    timeout_s: float = _WITHIN_S,
) -> dict[str, Any]:
    """Return a router's answer at a path, to a POST where there is a body; raise either of these.

    ``url`` is its base URL, with ``/v1`` or without; ``key`` the administration's.
    """
    request = urllib.request.Request(
        url.rstrip("/").removesuffix("/v1") + path,
        data=body,
        headers={"Content-Type": "application/json"},
    )
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        # Never through a proxy from the environment: routers are near.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise Refused(_refusal(error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise NoAnswerError(
            f"no router answers at {url} ({reason}); start one with 'warmroute serve', "
            "or name another with --router"
        ) from None
    return answer


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the router answered {error.code}"
