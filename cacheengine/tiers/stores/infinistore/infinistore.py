"""InfiniStore, a store behind RDMA. Untested on hardware: see `InfiniStore`."""

import logging
import struct
from collections.abc import Mapping
from typing import Any, Final

from cacheengine.tiers.stores.hosted.client_process import HostedLibrary
from cacheengine.tiers.stores.hosted.hosted import HostedStore
from cacheengine.tiers.stores.url import RemoteUrl, parse_remote_url
from warmroute_common.config_reader import BadValueError, parse_int

logger = logging.getLogger("vllm.warmroute")

SIZE_PREFIX: Final = struct.Struct("<8sQ")
"""What stands before a blob, whose size the server does not know: a magic word and the size."""

_TIMEOUT_S: Final = 5.0
_DEFAULT_BUFFER_MIB: Final = 256
_BUFFER_MIB: Final = parse_int(minimum=1, maximum=64 * 1024)
_LINK_TYPES: Final = ("Ethernet", "IB")
_OPTIONS: Final = ("device", "link_type", "ib_port", "buffer_mib")


class InfiniStore(HostedStore):
    """Blobs on an InfiniStore server, by its own client in a process of its own.

    UNTESTED ON HARDWARE: the server does not start without an RDMA device, so
    nothing here has met a real one. What is tested is that the client's library
    has the calls, with the parameters, that are made here, and, against a
    stand-in for the library, what is made of its answers.

    URL: ``infinistore://host:port/?device=mlx5_0&link_type=Ethernet&ib_port=1``,
    with ``buffer_mib`` for the memory through which chunks pass (pinned at once).
    """

    @classmethod
    def connect(
        cls, url: str, extra: Mapping[str, Any], timeout_s: float = _TIMEOUT_S
    ) -> "InfiniStore":
        """Return the store that ``remote_url`` describes; none of ``extra`` concerns it.

        As `MooncakeStore.connect` otherwise.
        """
        address = parse_remote_url(url)
        settings = _settings(address)
        memory_mib = address.option("buffer_mib", _BUFFER_MIB, _DEFAULT_BUFFER_MIB)
        _check_extra(extra)
        logger.warning("remote tier: %s: the InfiniStore adapter is untested on hardware", address)
        library = HostedLibrary(
            module="cacheengine.tiers.stores.infinistore.client",
            settings=settings,
            environment={},
            log_variable="INFINISTORE_LOG_LEVEL",
        )
        return cls(
            library,
            memory_bytes=memory_mib * 1024 * 1024,
            memory_setting="buffer_mib (in MiB) in remote_url",
            timeout_s=timeout_s,
            prefix_bytes=SIZE_PREFIX.size,
        )


def _settings(address: RemoteUrl) -> dict[str, Any]:
    address.check_options(_OPTIONS)
    address.check_is_bare("write infinistore://host:port/?device=name")
    link_type = address.options.get("link_type", _LINK_TYPES[0])
    if link_type not in _LINK_TYPES:
        raise BadValueError(f"link_type={link_type} is unknown", "write link_type=Ethernet or IB")
    return {
        "host_addr": address.host,
        "service_port": address.port,
        "dev_name": address.options.get("device", "mlx5_0"),
        "link_type": link_type,
        "ib_port": address.option("ib_port", parse_int(minimum=1, maximum=255), 1),
    }


def _check_extra(extra: Mapping[str, Any]) -> None:
    for key in extra:
        if str(key).startswith("infinistore"):
            options = ", ".join(_OPTIONS)
            raise BadValueError(f"{key} is no known key", f"set it in remote_url: {options}")
