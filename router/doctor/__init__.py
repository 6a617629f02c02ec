"""``warmroute doctor``: what is wrong with a configuration and its live fleet, in words.

`command` is the command. `examination` puts the checks together: of the router's own machine
(`own_machine`), of each replica (`replica_checks`), its agent (`agent_checks`), its KV events
(`event_checks`), its tokens (`token_checks`), and of replicas against each other
(`fleet_checks`). Each adds `findings`, one line each. Feeds, prompts and keys are the
router's own parts, so what they make of a replica here they make of it there.

Called by the command line. Imports config, prompt, residency, fleet, staging, lmcache, feeds,
launch and tasks.
"""

from router.doctor.command import doctor

__all__ = ["doctor"]
