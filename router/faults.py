"""Faults by which the router does not know what replicas hold, while every request is answered.

Prompts without exact tokens match no KV event and no agent's chunks; a replica without KV events
holds what nobody sees. Requests then go where their KV is not, and nothing fails. So these faults
are in ``GET /health``, in metrics, in ``warmroute doctor``, and in the log, again and again.
"""

import logging
from math import inf
from typing import Final

from router.fleet.fleet import Fleet
from router.fleet.replica import ReplicaState
from router.prompt.prompt_source import PromptSource

log = logging.getLogger("warmroute.faults")

_EVERY_S: Final = 2.0
"""Between two looks."""
_LASTING_S: Final = 10.0
"""Shorter faults are starts and restarts, and are not logged."""
_AGAIN_S: Final = 600.0
"""Between two lines about one fault that lasts."""


class FaultReport:
    """Finds the present faults, and logs faults that last."""

    def __init__(self, fleet: Fleet, prompts: PromptSource) -> None:
        self._fleet = fleet
        self._prompts = prompts
        self._due_s = -inf
        self._asked: dict[str, str] = {}
        self._since_s: dict[str, float] = {}
        self._logged_s: dict[str, float] = {}

    def tokens(self) -> dict[str, str]:
        """Return for each model ``exact``, why replicas tokenize its prompts, or what is wrong."""
        asked, inexact = self._prompts.asked(), self._prompts.inexact()
        return {model: why or asked.get(model, "exact") for model, why in inexact.items()}

    def found(self) -> dict[str, str]:
        """Return what is wrong, by the model or the replica that it is about."""
        faults = {
            f"model '{model}'": why
            for model, why in self._prompts.inexact().items()
            if why is not None
        }
        for each in self._fleet.replicas.values():
            is_up = each.state is ReplicaState.UP or each.is_leaving
            if is_up and (why := each.events_fault()) is not None:
                faults[f"replica '{each.id}'"] = why
        return faults

    def look(self, now_s: float) -> None:
        """Log faults that last, and their ends; must be called about once a second."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + _EVERY_S
        asked, self._asked = self._asked, self._prompts.asked()
        for model in self._asked.keys() - asked.keys():
            log.info("model '%s': %s", model, self._asked[model])
        faults = self.found()
        self._since_s = {about: self._since_s.get(about, now_s) for about in faults}
        for about, since_s in self._since_s.items():
            is_due = now_s - self._logged_s.get(about, -inf) >= _AGAIN_S
            if now_s - since_s >= _LASTING_S and is_due:
                self._logged_s[about] = now_s
                text = "%s: %s. Requests are routed without knowing what replicas hold"
                log.warning(text, about, faults[about])
        for about in self._logged_s.keys() - faults.keys():
            del self._logged_s[about]
            log.info("%s: this fault is over", about)
