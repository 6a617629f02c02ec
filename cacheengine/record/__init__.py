"""What the engine counts, and which keys came and went.

`EngineStats` has every counter with its definition; `EventLog` keeps the last changes of
keys with their numbers, for routers that follow them, and says when one has been missed.

Called by residency, engine and transfer. Imports keys and wire.
"""

from cacheengine.record.events import EventLog, KeyEventRecord, to_wire
from cacheengine.record.stats import CPU, BandwidthMeter, EngineStats, TierStats, counter

__all__ = [
    "CPU",
    "BandwidthMeter",
    "EngineStats",
    "EventLog",
    "KeyEventRecord",
    "TierStats",
    "counter",
    "to_wire",
]
