"""The load generator's process: ``python -m bench.overhead.load``, one case and one contender.

Standard input and output are as `bench.overhead.load.talk` has them.
"""

import gc
import resource
import sys
import time
from pathlib import Path

import msgspec
import uvloop

from bench.overhead import prompts
from bench.overhead.fake.answers import expected
from bench.overhead.load.connection import Connections
from bench.overhead.load.pace import Sent, flood, paced
from bench.overhead.load.talk import GO, Line, Outcome, Plan


async def generate(plan: Plan) -> None:
    """Carry out a plan."""
    sequences = prompts.read(Path(plan.bodies))
    connections = Connections(plan.urls, expected(plan.answer, plan.tokens))
    sent = Sent()
    gc.freeze()
    gc.disable()
    _say(Line(ready=True))
    if sys.stdin.readline() != GO:
        return
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    if plan.rate_per_s is None:
        await flood(connections.ask, sequences, plan.connections, sent)
    else:
        await paced(
            connections.ask,
            sequences,
            plan.rate_per_s,
            sent,
            lambda: _say(Line(open=sent.in_flight)),
        )
    elapsed_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
    _say(Line(done=_outcome(sent, elapsed_s, cpu_s)))
    connections.close()


def _outcome(sent: Sent, elapsed_s: float, cpu_s: float) -> Outcome:
    return Outcome(
        first_s=tuple(each.first_s - each.sent_s for each in sent.timings),
        whole_s=tuple(each.end_s - each.sent_s for each in sent.timings),
        errors=sent.errors,
        first_error=sent.first_error,
        elapsed_s=elapsed_s,
        cpu_s=cpu_s,
        late_s=tuple(sent.late_s),
    )


def _say(line: Line) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Carry out the plan on standard input; return the exit code."""
    uvloop.run(generate(msgspec.json.decode(sys.stdin.readline(), type=Plan)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
