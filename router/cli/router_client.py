"""The HTTP client of a running router, for `explain`, `usage`, `top`, `drain` and `resume`."""

import functools
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import click

from warmroute_common.admin_token import admin_token_headers
from warmroute_common.command_line import ADMIN_KEY, NumberRange, counted

_WITHIN_S: Final = 30.0


class NoAnswerError(click.ClickException):
    """The router cannot be reached."""


class RouterRefusedError(click.ClickException):
    """The router, or another server, answers with an error."""


class RouterClient:
    """Calls a running router's endpoints; failures say what to do."""

    def __init__(self, url: str, *, admin_key: str | None = None, ca_file: Path | None = None):
        """``url`` may end in ``/v1``. Raises click's errors for a URL or file that cannot be used.

        Without a key, the token of a router that this user runs on this machine is sent.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            fix = f"write http://{url}" if "://" not in url else "write http://host:port"
            raise click.BadParameter(f"'{url}' is not an HTTP URL; {fix}", param_hint="--router")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = admin_key
        # Never through a proxy from the environment: routers are on the local network.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if ca_file is not None:
            try:
                context = ssl.create_default_context(cafile=ca_file)
            except OSError as error:
                problem = f"{ca_file} is not a PEM file with certificates ({error.strerror})"
                raise click.BadParameter(problem, param_hint="--ca-file") from None
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def ask(
        self, path: str, body: bytes | None = None, *, timeout_s: float = _WITHIN_S
    ) -> dict[str, Any]:
        """Return the JSON answer to a GET, or to a POST if there is a body.

        Raises `NoAnswerError` or `RouterRefusedError`.
        """
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        else:  # read for each call: a router that was restarted has a new one
            headers |= admin_token_headers(self.url)
        request = urllib.request.Request(self.url + path, data=body, headers=headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            raise RouterRefusedError(self._refusal(error, path)) from None
        except (OSError, ValueError) as error:
            raise NoAnswerError(self._no_answer(error)) from None
        return answer

    def _refusal(self, error: urllib.error.HTTPError, path: str) -> str:
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return (
                f"the server at {self.url} is not a Warmroute router (it answers {path} with "
                f"{error.code}); give the router's URL with --router"
            )

    def _no_answer(self, error: Exception) -> str:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self.url} is not trusted ({reason.verify_message}); give "
                "the file of its authority with --ca-file"
            )
        if isinstance(reason, ssl.SSLError):
            return f"{self.url} does not speak TLS ({reason.reason}); try http:// with --router"
        if isinstance(error, ConnectionError) and self.url.startswith("http://"):
            return (
                f"the server at {self.url} closes the connection ({error}); if it speaks TLS, "
                f"write --router https://{self.url.removeprefix('http://')}"
            )
        if isinstance(error, ValueError):
            return f"the server at {self.url} is not a Warmroute router: its answer is not JSON"
        return (
            f"no router answers at {self.url} ({reason}); start one with 'warmroute serve', or "
            "give another URL with --router"
        )


_OPTIONS: Final = (
    click.option(
        "--router",
        "--url",
        "url",
        metavar="URL",
        default="http://127.0.0.1:8080",
        show_default=True,
        help="The running router.",
    ),
    ADMIN_KEY,
    click.option(
        "--ca-file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="PEM file of the authority that signed the router's certificate.",
    ),
)


def asks_router(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options for reaching a router, and a `RouterClient` named ``router``."""

    @functools.wraps(command)
    def with_client(
        *, url: str, admin_key: str | None, ca_file: Path | None, **options: Any
    ) -> None:
        command(router=RouterClient(url, admin_key=admin_key, ca_file=ca_file), **options)

    for option in reversed(_OPTIONS):
        with_client = option(with_client)
    return with_client


@click.command(short_help="Take a replica out of service.")
@click.argument("replica")
@click.option(
    "--wait-s",
    type=NumberRange(0, 3600),
    metavar="SECONDS",
    default=600.0,
    show_default=True,
    help="How long to wait for its requests to finish; 0: do not wait.",
)
@asks_router
def drain(replica: str, router: RouterClient, wait_s: float) -> None:
    """Take REPLICA (its id) out of service without losing a request.

    The router sends it nothing new. Its sessions continue on other replicas,
    which copy its KV where they can. Exit code 1 if requests still run there
    after --wait-s. 'warmroute resume' puts it back into service; so does a
    restart of the router.
    """
    path = f"/replicas/{quote(replica, safe='')}/drain?wait_s={wait_s:g}"
    answer = router.ask(path, b"", timeout_s=wait_s + 30)
    running = counted(answer["in_flight"], "request")
    click.echo(f"{answer['id']} is {answer['state']}; {running} in flight")
    if wait_s and answer["in_flight"]:
        raise click.exceptions.Exit(1)


@click.command(short_help="Put a drained replica back into service.")
@click.argument("replica")
@asks_router
def resume(replica: str, router: RouterClient) -> None:
    """Put REPLICA (its id) back into service after 'warmroute drain'."""
    router.ask(f"/replicas/{quote(replica, safe='')}/resume", b"")
    click.echo(f"{replica} is back in service; it gets requests once a health probe succeeds")
