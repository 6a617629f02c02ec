"""Which replicas the fleet has and which settings apply, while both change."""

from router.membership.discovery import Discovery
from router.membership.membership import Membership, Source
from router.membership.reload import ConfigFile, Reload

__all__ = ["ConfigFile", "Discovery", "Membership", "Reload", "Source"]
