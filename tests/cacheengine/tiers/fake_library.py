"""A client library that keeps blobs in its process, and fails as names tell it to."""

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cacheengine.tiers.client_host import ABSENT, FULL, STORED, UNREAD, ClientError, StoreClient
from cacheengine.tiers.hosted_store import HostedLibrary


def fake_library(**settings: Any) -> HostedLibrary:
    """Settings: ``refuses_while`` names a file; ``slow_s``; ``room`` in blobs.

    And ``never_connects``: it hangs there.
    """
    return HostedLibrary(
        module=__name__, settings=settings, environment={}, log_variable="FAKE_LIBRARY_LOG"
    )


def make_client(settings: Mapping[str, Any]) -> StoreClient:
    return FakeClient(settings)


class FakeClient(StoreClient):
    """Names that contain hang, die, slow, refused or unread do what they say."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._blobs: dict[str, bytes] = {}

    def connect(self, address: int, size_bytes: int) -> None:
        if self._settings.get("never_connects"):
            threading.Event().wait()
        file = self._settings.get("refuses_while")
        if file and Path(file).exists():
            raise ClientError("the file is there")

    def exists(self, names: Sequence[str]) -> list[int]:
        self._obey(names)
        return [int(name in self._blobs) for name in names]

    def get(
        self, names: Sequence[str], addresses: Sequence[int], limits: Sequence[int]
    ) -> list[int]:
        self._obey(names)
        return [self._get(*each) for each in zip(names, addresses, limits, strict=True)]

    def _get(self, name: str, address: int, limit: int) -> int:
        if "unread" in name:
            return UNREAD
        blob = self._blobs.get(name)
        if blob is None:
            return ABSENT
        if len(blob) <= limit:
            ctypes.memmove(address, blob, len(blob))
        return len(blob)

    def put(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        self._obey(names)
        return [self._put(*each) for each in zip(names, addresses, sizes, strict=True)]

    def _put(self, name: str, address: int, size: int) -> int:
        if len(self._blobs) >= self._settings.get("room", 1000):
            return FULL
        self._blobs[name] = ctypes.string_at(address, size)
        return STORED

    def remove(self, names: Sequence[str]) -> None:
        self._obey(names)
        for name in names:
            self._blobs.pop(name, None)

    def close(self) -> None:
        pass

    def _obey(self, names: Sequence[str]) -> None:
        text = " ".join(names)
        if "die" in text:
            os._exit(7)
        if "hang" in text:
            threading.Event().wait()
        if "slow" in text:
            threading.Event().wait(self._settings["slow_s"])
        if "refused" in text:
            raise ClientError("refused, as told")
