"""The secret of the controller's port.

Callers send it as a bearer token or as the password of basic authentication, whatever the name.
Programs that take nothing but a URL send the latter: ``http://any:SECRET@host:9000``.
"""

import binascii
import hmac
from base64 import b64decode

from aiohttp import web

from router.access import Access
from router.config import Unauthorized


def check_secret(request: web.Request, secret: str | None, access: Access) -> None:
    """Raise `Unauthorized` for a caller that knows neither the secret nor an admin key.

    Where there are neither, everyone is let in.
    """
    if secret is None and not access.has_admin_keys:
        return
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    told = value.strip()
    if kind.lower() == "basic":
        told = _password(told)
    elif kind.lower() != "bearer":
        told = ""
    # Bytes: text of other alphabets than ASCII cannot be compared in constant time.
    is_known = secret is not None and hmac.compare_digest(
        told.encode(errors="replace"), secret.encode()
    )
    if not is_known and not access.is_admin_key(told):
        raise Unauthorized(
            "this port asks for controller.secret or an admin key: as a bearer token, or in the "
            "URL, http://any:SECRET@host:port"
        )


def _password(encoded: str) -> str:
    try:
        return b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
