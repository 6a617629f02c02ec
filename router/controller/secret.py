"""The secret of the controller's port.

Callers send it as a bearer token or as the password of basic authentication, whatever the name.
Programs that take nothing but a URL send the latter: ``http://any:SECRET@host:9000``.
"""

import binascii
import hmac
from base64 import b64decode

from aiohttp import web

from router.config import Unauthorized


def check_secret(request: web.Request, secret: str) -> None:
    """Raise `Unauthorized` for a caller that does not know the secret."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    told = value.strip()
    if kind.lower() == "basic":
        told = _password(told)
    elif kind.lower() != "bearer":
        told = ""
    # Bytes: text of other alphabets than ASCII cannot be compared in constant time.
    if not hmac.compare_digest(told.encode(errors="replace"), secret.encode()):
        raise Unauthorized(
            "this port asks for controller.secret: as a bearer token, or in the URL, "
            "http://any:SECRET@host:port"
        )


def _password(encoded: str) -> str:
    try:
        return b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
