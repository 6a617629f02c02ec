"""Copies of chunks from one replica to another over TCP."""

from cacheengine.transfer.fetch import Fetch
from cacheengine.transfer.transfer_server import TransferServer

__all__ = ["Fetch", "TransferServer"]
