"""Whether ``remote_url`` and ``remote_serde`` can be served: asked before vLLM starts.

No server is asked: one that is down now may be up later.
"""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Final

from cacheengine.tiers.serde import SERDE_NAMES
from cacheengine.tiers.stores import parse_remote_url
from cacheengine.tiers.stores.mooncake import mooncake_settings
from cacheengine.tiers.stores.redis import REDIS_SCHEMES, RedisServer
from warmroute_common.config_values import BadValueError, suggestion

_PACKAGES: Final[Mapping[str, tuple[str, str]]] = {
    "mooncakestore": ("mooncake", "mooncake-transfer-engine-non-cuda"),
    "infinistore": ("infinistore", "infinistore"),
}
"""What a scheme needs: the module to import, and the package that has it.

Chunks are read from and written to CPU memory, so a build for CUDA would serve no better.
"""


def check_remote_url(text: str, extra: Mapping[str, Any]) -> None:
    """Raise `BadValueError`, without any password in it, for a server that is not served.

    ``extra`` is ``extra_config``, which some stores have settings in.
    """
    url = parse_remote_url(text)
    if url.scheme in REDIS_SCHEMES:
        RedisServer.from_url(url)
    elif url.scheme == "mooncakestore":
        mooncake_settings(text, extra, os.environ)


def check_remote_ready(text: str) -> None:
    """Raise `BadValueError` for what the URL needs and this machine has not: packages, files."""
    url = parse_remote_url(text)
    if url.scheme in REDIS_SCHEMES:
        RedisServer.from_url(url).check_files()
    elif url.scheme in _PACKAGES:
        module, package = _PACKAGES[url.scheme]
        if importlib.util.find_spec(module) is None:
            raise BadValueError(f"{url.scheme}:// needs a package", f"pip install {package}")


def check_serde_name(name: str) -> None:
    """Raise `BadValueError` for a name that no serde has."""
    if name not in SERDE_NAMES:
        raise BadValueError(f"{name!r} is unknown", suggestion(name.lower(), SERDE_NAMES))
