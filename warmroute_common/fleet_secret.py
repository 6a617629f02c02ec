"""The secret that router and replicas share, and how requests made by web pages are recognized."""

import hmac
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from warmroute_common.config_reader import BadValueError

VARIABLE: Final = "WARMROUTE_FLEET_SECRET"
"""The environment variable that holds the secret, at router and replicas alike."""
FILE_KEY: Final = "fleet_secret_file"
"""The key of both configurations that names a file with it instead."""
HOW_TO_SET: Final = (
    f"set {FILE_KEY}, or the variable {VARIABLE}, to the same at router and replicas"
)

_LEAST: Final = 16
_MOST: Final = 512


class FleetSecret:
    """What router and replicas know and nobody else. Raises `BadValueError` for one easily guessed.

    Over HTTP they show a token made from it, never itself: a listener there
    learns nothing by which chunks could be forged.
    """

    def __init__(self, text: str) -> None:
        if not (text.isascii() and text.isprintable()) or " " in text:
            problem = "the fleet secret has spaces, or other than printable ASCII characters"
            raise BadValueError(problem, "take letters and digits: openssl rand -hex 32")
        if not _LEAST <= len(text) <= _MOST:
            problem = f"the fleet secret has {len(text)} characters, not {_LEAST} to {_MOST}"
            raise BadValueError(problem, "make one: openssl rand -hex 32")
        self._secret = text.encode()
        self.token = self.key("http").hex()
        """What a request shows, as a bearer token."""

    def __repr__(self) -> str:
        return "FleetSecret(...)"

    def key(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose, from which those for others cannot be found."""
        return hmac.digest(self._secret, f"warmroute {purpose}".encode(), "sha256")

    def is_known_by(self, shown: str) -> bool:
        """Whether a caller shows the token, or the secret itself as people do; constant time."""
        # Bytes: text of other alphabets than ASCII cannot be compared in constant time.
        given = shown.encode(errors="replace")
        is_token = hmac.compare_digest(given, self.token.encode())
        return hmac.compare_digest(given, self._secret) or is_token

    def headers(self, url: str) -> dict[str, str]:
        """Return the headers that show the token; none for a URL that has a password itself."""
        return {} if "@" in urlsplit(url).netloc else {"Authorization": f"Bearer {self.token}"}


def read_fleet_secret(path: Path | None, environment: Mapping[str, str]) -> FleetSecret | None:
    """Return the secret in a file or the environment; None where neither is given.

    Raises `BadValueError` for one that cannot be read or used, and where both are given.
    """
    given = environment.get(VARIABLE, "").strip() or None
    if path is None:
        return None if given is None else FleetSecret(given)
    if given is not None:
        raise BadValueError(f"{path} is named, and {VARIABLE} is set too", "take one of them away")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        fix = "name a file that this user may read, with the secret in it"
        raise BadValueError(f"{path} cannot be read ({reason})", fix) from None
    return FleetSecret(text)


def may_be_of_a_page(host: str | None, origin: str | None) -> bool:
    """Whether a page of another site may have made a request, by its Host and Origin headers.

    Such a page has its own name resolved to this machine (DNS rebinding), or sends here what
    a form can send. What is no browser names no origin, and this machine by its name or address.
    """
    if host is not None and not _is_own_name(host):
        return True
    return origin is not None and origin.partition("://")[2] != host


def _is_own_name(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", socket.gethostname().lower()) or bool(ip_address(name))
    except ValueError:
        return False
