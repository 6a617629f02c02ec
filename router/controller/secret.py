"""Which requests the controller's ports take: with a secret that they know.

Callers send it as a bearer token or as the password of basic authentication, whatever the name.
Programs that take nothing but a URL send the latter: ``http://any:SECRET@host:9000``.
"""

import binascii
import hmac
from base64 import b64decode

from aiohttp import web

from router.access import Access
from warmroute_common.api_errors import ForbiddenError, UnauthorizedError
from warmroute_common.fleet_secret import FleetSecret, may_be_of_a_page


class Guard:
    """Knows the controller's own secret, admin keys, and the fleet's secret: any of them will do.

    Where there are none every caller is let in but web pages of other sites.
    """

    def __init__(
        self, secret: str | None, access: Access, fleet_secret: FleetSecret | None
    ) -> None:
        self._secret = secret
        self._access = access
        self._fleet_secret = fleet_secret

    def check(self, request: web.Request) -> None:
        """Raise `UnauthorizedError` for a caller that knows none, `ForbiddenError` for a page."""
        has_secret = self._secret is not None or self._fleet_secret is not None
        if not has_secret and not self._access.has_admin_keys:
            self.check_page(request)
            return
        told = _told(request)
        if not self._is_known(told) and not self._access.is_admin_key(told):
            raise UnauthorizedError(
                "this port asks for controller.secret, an admin key or the fleet's secret: as a "
                "bearer token, or in the URL, http://any:SECRET@host:port"
            )

    def check_page(self, request: web.Request) -> None:
        """Raise `ForbiddenError` for what a web page in a browser on this machine may have sent."""
        if may_be_of_a_page(request.headers.get("Host"), request.headers.get("Origin")):
            raise ForbiddenError(
                "a web page may have sent this, by its Host or Origin header: name this machine "
                "by localhost or its address, or set controller.secret"
            )

    def _is_known(self, told: str) -> bool:
        # Bytes: text of other alphabets than ASCII cannot be compared in constant time.
        is_own = self._secret is not None and hmac.compare_digest(
            told.encode(errors="replace"), self._secret.encode()
        )
        return is_own or (self._fleet_secret is not None and self._fleet_secret.is_known_by(told))


def _told(request: web.Request) -> str:
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    return _password(value.strip()) if kind.lower() == "basic" else ""


def _password(encoded: str) -> str:
    try:
        return b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
