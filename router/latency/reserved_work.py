"""What requests that wait in the router will ask of the replicas that they wait for. Pure."""


class Promised:
    """Work and requests by the slot of the replica that will get them."""

    def __init__(self) -> None:
        self._work_s: dict[int, float] = {}
        self._requests: dict[int, int] = {}

    def work_s(self, slot: int) -> float:
        """Return the seconds of a replica's time that are promised to it."""
        return self._work_s.get(slot, 0.0)

    def requests(self, slot: int) -> int:
        """Return how many requests are promised to it."""
        return self._requests.get(slot, 0)

    def add(self, slot: int, service_s: float) -> None:
        """Note that a replica will get a request that takes so much of its time."""
        self._work_s[slot] = self._work_s.get(slot, 0.0) + service_s
        self._requests[slot] = self._requests.get(slot, 0) + 1

    def remove(self, slot: int, service_s: float) -> None:
        """Take back an `add`."""
        self._work_s[slot] -= service_s
        self._requests[slot] -= 1
