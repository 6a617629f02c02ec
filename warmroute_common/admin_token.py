"""The token by which commands on the router's own machine administer it.

The router makes a new token at each start and writes it to a file that only its own user can read.
Commands of that user find the file by the port in the router's URL. A caller's address proves
nothing: behind a proxy on the same machine every client has the address 127.0.0.1.
"""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE, S_ISDIR, S_ISREG
from typing import Final
from urllib.parse import urlsplit

from warmroute_common.addresses import is_loopback

HEADER: Final = "X-Warmroute-Admin-Key"
"""Takes the token or an admin key. ``Authorization`` stays free for a client's key."""
_PORTS: Final = {"http": 80, "https": 443}
_LONGEST_BYTES: Final = 256


def new_admin_token() -> str:
    """Return a new random token."""
    return secrets.token_urlsafe(32)


def write_admin_token(token: str, port: int) -> Path:
    """Write the token of the router at ``port``, readable by this user only; return the file.

    Raises OSError if no directory can be used.
    """
    problem: OSError | None = None
    for directory in _directories():
        path = directory / f"admin-{port}"
        try:
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            _check_private(directory)
            path.unlink(missing_ok=True)
            # Exclusive: a file that somebody else has put there is never written to.
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token)
        except OSError as error:
            problem = error
        else:
            return path
    assert problem is not None
    raise problem


def remove_admin_token(path: Path, token: str) -> None:
    """Remove the file, unless another router has replaced it."""
    with suppress(OSError, UnicodeDecodeError):
        if path.read_text() == token:
            path.unlink()


def admin_token_headers(url: str) -> dict[str, str]:
    """Return the header that administers the router at a URL; none if its token is not known here.

    Only loopback URLs: the token is not sent to other machines.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        return {}
    if not is_loopback(parts.hostname or ""):
        return {}
    for directory in _directories():
        path = directory / f"admin-{port}"
        with suppress(OSError, UnicodeDecodeError):
            _check_private(directory)
            # Owned by this user: another user could otherwise learn where it is sent to.
            found = path.lstat()
            if S_ISREG(found.st_mode) and found.st_uid == os.getuid():
                return {HEADER: path.read_bytes()[:_LONGEST_BYTES].decode("ascii")}
    return {}


def _directories() -> Iterator[Path]:
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "warmroute"
    yield Path(tempfile.gettempdir()) / f"warmroute-{os.getuid()}"


def _check_private(directory: Path) -> None:
    """Raise OSError unless a directory belongs to this user, who alone may enter it."""
    found = directory.lstat()
    is_own = S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or S_IMODE(found.st_mode) & 0o077:
        raise OSError(f"{directory} is not a directory that only this user may enter")
