"""The page at ``/ui``."""

from router.ui.page import FILES, Page
from router.ui.recent import Recent

__all__ = ["FILES", "Page", "Recent"]
