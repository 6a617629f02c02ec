"""The agent: a small HTTP server inside each replica, beside its engine.

It answers what the engine holds, executes the controls on request, fetches
chunks from other replicas, and feeds routers with what changes
(`warmroute_common.agent_protocol` has the formats).

Started by connector and simulator. Imports engine, transfer, residency, record,
identity and settings.
"""

from cacheengine.agent.agent import Agent

__all__ = ["Agent"]
