"""vLLM's NixlConnector between simulated replicas of one process.

A request that asks for it lends its KV when it has finished: its blocks stay held until another
replica has pulled them, or until the lease ends. As in vLLM, nobody checks that what is pulled is
still lent: an answer to KV that is not is wrong here, too. A replica that has ended cannot be
pulled from; vLLM answers 500 then.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from simulator.model.sim_request import SimRequest

LEASE_S: Final = 30.0
"""vLLM's ``kv_lease_duration``."""


@dataclass(frozen=True, slots=True)
class Pull:
    """KV that another replica lends to a request."""

    engine_id: str
    request_id: str
    cached_tokens: int | None
    """Tokens of the prompt that were cached there."""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> "Pull | None":
        """Return what ``kv_transfer_params`` name; None if they name nothing to pull."""
        engine_id, request_id = params.get("remote_engine_id"), params.get("remote_request_id")
        if params.get("do_remote_prefill") is not True or not (engine_id and request_id):
            return None
        return cls(str(engine_id), str(request_id), params.get("remote_prefill_cached_tokens"))


@dataclass(slots=True)
class _Loan:
    request: SimRequest
    timer: asyncio.TimerHandle
    is_awaited: Callable[[], bool] | None = None
    """Whether the request that pulls it is still waiting; then the lease is renewed."""


class NixlNetwork:
    """The connectors that reach each other, by engine id."""

    def __init__(self) -> None:
        self.connectors: dict[str, NixlConnector] = {}

    def lender(self, pull: Pull) -> "NixlConnector | None":
        """Return who lends, None if it has ended."""
        return self.connectors.get(pull.engine_id)


class NixlConnector:
    """What one replica lends. ``free`` returns a request's blocks; `close` ends the connector."""

    def __init__(
        self, network: NixlNetwork, free: Callable[[SimRequest], None], *, lease_s: float = LEASE_S
    ) -> None:
        self.engine_id = uuid.uuid4().hex
        self.network = network
        self._free = free
        self._lease_s = lease_s
        self._loans: dict[str, _Loan] = {}
        network.connectors[self.engine_id] = self

    def __len__(self) -> int:
        """How many prompts are lent."""
        return len(self._loans)

    def lend(self, request: SimRequest) -> dict[str, Any]:
        """Lend a finished request's KV; return the ``kv_transfer_params`` of its answer."""
        timer = asyncio.get_running_loop().call_later(self._lease_s, self._expire, request.id)
        self._loans[request.id] = _Loan(request, timer)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(request.num_blocks))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.id,
            "remote_host": "127.0.0.1",
            "remote_port": 0,
            "tp_size": 1,
            "remote_num_tokens": request.prompt_tokens,
            "remote_prefill_cached_tokens": request.cached.total,
            "transfer_mode": "pull",
        }

    def keep(self, request_id: str, is_awaited: Callable[[], bool]) -> None:
        """Renew a lease while a request that will pull it waits."""
        if (loan := self._loans.get(request_id)) is not None:
            loan.is_awaited = is_awaited

    def end(self, request_id: str) -> bool:
        """Note that KV was pulled, or that nobody will; return whether it was lent until now."""
        loan = self._loans.pop(request_id, None)
        if loan is None:
            return False
        loan.timer.cancel()
        self._free(loan.request)
        return True

    def close(self) -> None:
        """End, with all that is lent."""
        self.network.connectors.pop(self.engine_id, None)
        for each in self._loans.values():
            each.timer.cancel()
        self._loans.clear()

    def _expire(self, request_id: str) -> None:
        loan = self._loans[request_id]
        if loan.is_awaited is not None and loan.is_awaited():
            renewed_s = self._lease_s * 2 / 3
            loan.timer = asyncio.get_running_loop().call_later(renewed_s, self._expire, request_id)
        else:
            self.end(request_id)
