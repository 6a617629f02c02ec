"""Asking a running router from a terminal.

`answer_of` asks, for any command, and says in words why there is no answer. The commands here are
`top`, of which `frame` makes one frame (the state of the page at ``/ui``, by rich), `drain` and
`resume`.

Called by the commands. Imports no other room.
"""

from router.terminal.asking import NoAnswerError, Refused, answer_of
from router.terminal.command import top
from router.terminal.draining import drain, resume
from router.terminal.options import ADMIN_KEY, ROUTER

__all__ = [
    "ADMIN_KEY",
    "ROUTER",
    "NoAnswerError",
    "Refused",
    "answer_of",
    "drain",
    "resume",
    "top",
]
