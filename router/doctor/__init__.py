"""``warmroute doctor``: checks a configuration and its live fleet."""

from router.doctor.command import doctor

__all__ = ["doctor"]
