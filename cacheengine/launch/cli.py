"""The old place of the command, for installations whose entry points name it."""

from cacheengine.launch.replica_command import replica

__all__ = ["replica"]
