"""AIPerf itself: an environment of its own, the command that profiles, one run of it.

It is told of its tokenizer by a name on the Hugging Face hub that it finds in a
cache made for it: with ``HF_HUB_OFFLINE`` set, AIPerf 0.13 takes no directory.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from bench.environments import installed
from bench.ttft import BenchError
from router.launch.processes import ChildDiedError, ProcessGroup, tail

PACKAGES: Final = ("aiperf==0.13.0",)
DIRECTORY: Final = Path.home() / ".cache" / "warmroute-aiperf"
TOKENIZER: Final = "warmroute/served"
"""What AIPerf calls the tokenizer of the model that is served."""
ARTIFACTS: Final = "artifacts"
"""Where it leaves its report, in its working directory."""

_NAME: Final = "aiperf"
_LIMIT_S: Final = 900.0
_POLL_S: Final = 0.2
_REVISION: Final = "0" * 40
_TOKENIZER_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Conversations that AIPerf generates: each turn sends all that was said before it."""

    conversations: int
    concurrency: int
    """Conversations under way at a time; the next turn follows the answer at once."""
    contexts: int
    """Each conversation begins with one of so many, drawn at random."""
    context_tokens: int
    turns: int = 5
    turns_stddev: int = 2
    turn_tokens: int
    """Of what the user says in a turn."""
    turn_tokens_stddev: int
    answer_tokens: int
    ttft_bound_ms: int
    """An answer whose first token comes later is no good one."""
    seed: int

    def share(self, of: int) -> Self:
        """Return one of so many equal parts: fewer conversations, at a time too, and contexts."""
        return replace(
            self,
            conversations=max(1, self.conversations // of),
            concurrency=max(1, self.concurrency // of),
            contexts=max(1, self.contexts // of),
        )


def aiperf() -> Path:
    """Return the program, installed when it is first asked for; raises `NotInstalledError`."""
    return installed(DIRECTORY, PACKAGES).with_name(_NAME)


def arguments(workload: Workload, *, model: str, urls: Sequence[str]) -> list[str]:
    """Return what AIPerf is told; each of several ``urls`` gets conversations in turn."""
    return [
        "profile",
        *("--model", model, "--tokenizer", TOKENIZER),
        *(part for url in urls for part in ("--url", url)),
        *("--endpoint-type", "chat", "--streaming"),
        # Which is where the router looks for a session, unless it is told of another header.
        *("--session-header", "x-session-id"),
        *("--conversation-num", str(workload.conversations)),
        *("--conversation-turn-mean", str(workload.turns)),
        *("--conversation-turn-stddev", str(workload.turns_stddev)),
        *("--num-prefix-prompts", str(workload.contexts)),
        *("--prefix-prompt-length", str(workload.context_tokens)),
        *("--isl", str(workload.turn_tokens), "--isl-stddev", str(workload.turn_tokens_stddev)),
        *("--osl", str(workload.answer_tokens)),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
        # The words of a small model, put together, are other tokens than it said.
        "--use-server-token-count",
        *("--concurrency", str(workload.concurrency)),
        *("--goodput", f"time_to_first_token:{workload.ttft_bound_ms}"),
        *("--random-seed", str(workload.seed)),
        # It shares a small machine with all that it measures.
        *("--workers-max", "2", "--record-processor-service-count", "1"),
        *("--no-gpu-telemetry", "--no-server-metrics", "--export-level", "summary"),
        *("--ui", "none", "--artifact-dir", ARTIFACTS),
    ]


def profile(
    program: Path, told: Sequence[str], *, group: ProcessGroup, tokenizer: Path, work: Path
) -> float:
    """Run AIPerf in ``work``, an empty directory; return its seconds.

    Raises `BenchError` when it fails, or anything else of the group ends.
    """
    environment = _environment(tokenizer, work)
    log = work / f"{_NAME}.log"
    began_s = time.monotonic()
    group.start(_NAME, [str(program), *told], environment, log, cwd=work)
    try:
        _wait(group, began_s + _LIMIT_S, log)
    finally:
        group.stop(_NAME)
    return time.monotonic() - began_s


def _wait(group: ProcessGroup, deadline_s: float, log: Path) -> None:
    """Return when AIPerf has ended well."""
    while time.monotonic() < deadline_s:
        try:
            group.check()
        except ChildDiedError as ended:
            if ended.name == _NAME and ended.returncode == 0:
                return
            raise BenchError(str(ended)) from None
        time.sleep(_POLL_S)
    raise BenchError(f"AIPerf did not end within {_LIMIT_S:.0f} s:\n{tail(log)}")


def _environment(tokenizer: Path, work: Path) -> dict[str, str]:
    """Return an environment without a network, in which all that is left lies in ``work``."""
    home, temporary = work / "hub", work / "tmp"
    temporary.mkdir()
    fill_hub(home / "hub", tokenizer)
    return {
        **os.environ,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(temporary),
        # Its table is as wide as what it takes for the terminal.
        "COLUMNS": "140",
    }


def fill_hub(cache: Path, tokenizer: Path) -> None:
    """Make a cache of the hub that holds a tokenizer's files as those of `TOKENIZER`."""
    kept = cache / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = kept / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(_REVISION, encoding="utf-8")
    for name in _TOKENIZER_FILES:
        shutil.copy(tokenizer / name, snapshot)
