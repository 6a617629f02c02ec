"""Wait until a vLLM that is to be stopped has no requests, at most for a time.

    python3 drain.py URL_OF_METRICS SECONDS

The chart runs it in a replica before the replica is stopped. Routers have removed the pod from
their fleet by then, or do so meanwhile. Standard library only.
"""

import re
import sys
import time
import urllib.request

NOTICED_S = 5.0
"""Routers watch the Kubernetes API, so they know within this time that the pod is terminating."""
REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)


def requests_at(url: str) -> float:
    """Return how many requests vLLM has; raise OSError if it does not answer."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    return sum(float(each) for each in REQUESTS.findall(text))


def main(url: str, limit_s: float) -> None:
    """Return when vLLM is idle, gone, or has had its time."""
    end_s = time.monotonic() + limit_s
    time.sleep(min(NOTICED_S, limit_s))
    while time.monotonic() < end_s:
        try:
            if not requests_at(url):
                return
        except OSError:
            return
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
