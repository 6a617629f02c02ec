"""Asking a running router from a terminal, and what ``warmroute top`` shows there.

`answer_of` asks, for any command, and says in words why there is no answer. `top` is the command,
`frame` makes one frame of what it shows: the state of the page at ``/ui``, by rich.

Called by the commands. Imports no other room.
"""

from router.terminal.asking import NoAnswer, Refused, answer_of
from router.terminal.command import top

__all__ = ["NoAnswer", "Refused", "answer_of", "top"]
