"""Chunks from one replica to another, over a socket of their own.

`TransferServer` sends what a peer asks for from where it lies; `Fetch` receives chunks into
slots of the pool, checks them, and counts what came.

Called by agent, connector and simulator. Imports engine, residency and record.
"""

from cacheengine.transfer.fetch import Fetch
from cacheengine.transfer.transfer_server import TransferServer

__all__ = ["Fetch", "TransferServer"]
