"""Mooncake Store, a store in the memory of the fleet itself."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, Final

from cacheengine.tiers.stores.hosted.client_process import HostedLibrary
from cacheengine.tiers.stores.hosted.hosted import HostedStore
from cacheengine.tiers.stores.mooncake.settings import mooncake_settings

_TIMEOUT_S: Final = 5.0


class MooncakeStore(HostedStore):
    """Blobs as objects of one Mooncake Store, by its own client in a process of its own.

    That client hangs when it is closed or set up without a master, crashes when
    it is used after that, and brings a Go runtime and its signal handlers.

    What Mooncake makes of the contract:

    - Objects do not change, and names are those of their content: a put of a
      name that is there counts as stored, and leaves what is there. Its upsert
      would replace it, but writes over bytes that others are reading. What is
      damaged is removed by the tier, and can then be put anew.
    - A put that another client has begun and not ended counts as stored, too:
      for up to 30 s, after a client died in the middle, there is nothing then.
    - `remove` removes at once, lease or not, or a damaged blob that is read
      again and again would never go. A reader of that moment may
      read bytes of something else: the envelope's checksum finds out.
    - What a replica contributed to the store is gone when its process is.
    """

    @classmethod
    def connect(
        cls,
        url: str,
        extra: Mapping[str, Any],
        timeout_s: float = _TIMEOUT_S,
        environment: Mapping[str, str] = os.environ,
    ) -> "MooncakeStore":
        """Return the store that ``remote_url`` and ``extra_config`` describe.

        Does not wait for the server. ``timeout_s`` is what a call may take,
        beside the time for its bytes, unless ``extra`` says so itself. Raises
        `BadValueError` for settings that cannot work.
        """
        settings = mooncake_settings(url, extra, environment)
        timeout_s = settings.transfer_timeout or timeout_s
        library = HostedLibrary(
            module="cacheengine.tiers.stores.mooncake.client",
            settings=dataclasses.asdict(settings),
            environment=_environment(timeout_s),
            log_variable="MC_LOG_LEVEL",
        )
        return cls(
            library,
            memory_bytes=settings.local_buffer_size,
            memory_setting="local_buffer_size in extra_config",
            timeout_s=timeout_s,
        )


def _environment(timeout_s: float) -> dict[str, str]:
    """Let the library give up before the caller does: then it need not be killed."""
    data_s = str(max(1, math.floor(timeout_s / 2)))
    return {
        "MC_RPC_TIMEOUT_MS": str(round(timeout_s / 2 * 1000)),
        # It tries three times.
        "MC_RPC_CONNECT_TIMEOUT_MS": str(round(timeout_s / 4 * 1000)),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": data_s,
        "MC_TCP_STATUS_TIMEOUT_SEC": data_s,
    }
