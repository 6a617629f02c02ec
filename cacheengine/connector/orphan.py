"""An engine process whose server has been killed must not live on.

vLLM's API server ends its engine process when it ends in order. Killed with
SIGKILL it cannot, and the engine process, with the model's memory, the agent's
port and the disk tier's lock, would stay for ever: no restart could succeed.
"""

import logging
import multiprocessing
import os
import select
import signal
import threading
import time
from typing import Final

logger = logging.getLogger("vllm.warmroute")

_GRACE_S: Final = 30.0
"""For ending in order; the engine's own limits are well below."""


def end_with_parent(grace_s: float = _GRACE_S) -> None:
    """End this process soon after its parent: by SIGTERM, then at once.

    Does nothing in a process that `multiprocessing` did not start: its parent
    is a shell, and may go.
    """
    if multiprocessing.parent_process() is None:
        return
    parent = os.getppid()
    watch = threading.Thread(
        target=_watch, args=(parent, grace_s), name="kv-parent-watch", daemon=True
    )
    watch.start()


def _watch(parent: int, grace_s: float) -> None:
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        pass  # it has gone already
    except OSError as error:
        logger.warning("cannot watch the API server (%s): kill both if it is killed", error)
        return
    else:
        # The parent may have ended before, and its number been given away.
        if os.getppid() == parent:
            select.select([descriptor], [], [])
        os.close(descriptor)
    logger.error("the API server (process %d) has ended; ending the engine too", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)
