"""The agent: the HTTP server inside each replica through which routers and peers use its engine."""

from cacheengine.agent.agent import Agent

__all__ = ["Agent"]
