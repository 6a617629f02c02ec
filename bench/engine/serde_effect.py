"""What a serde does to a replica's answers.

A replica computes the KV of some prompts and writes it to its disk tier. It
ends; every chunk in its directory is encoded and decoded; it starts again,
and its answers from what it finds on disk are compared with those from the
untouched chunks: its predictions of each of the next tokens, the ones before
given, and how long it says the same when it goes on by itself.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.replica.local import (
    REPLICA_READY_TIMEOUT_S,
    find_platform,
    platform_arguments,
    replica_command,
    replica_environment,
)
from bench.replica.text import real_text
from bench.replica.tiers import ReplicaTiers, call, common_prefix
from bench.ttft import BenchError
from cacheengine.launch.launch import free_ports
from router.launch.processes import ProcessGroup

_MODEL: Final = "serde"
_CHUNK_TOKENS: Final = 256
_TAIL_TOKENS: Final = 20
"""Of a prompt behind its last whole chunk: computed, never loaded."""
_TOP: Final = 20
_SAID_TOKENS: Final = 64
_LAYOUT: Final = {"chunk_size": _CHUNK_TOKENS, "max_local_cpu_size": 1.0}

Prediction = dict[str, float]
"""Log probabilities of the likeliest next tokens, by token."""


@dataclass(frozen=True)
class Answers:
    """What a replica makes of the prompts."""

    predictions: list[Prediction]
    """Of every position of every prompt's continuation."""
    said: list[list[int]]
    """Each prompt's own continuation."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """How answers differ from those to the untouched chunks."""

    predictions: int
    same_best_token: float
    """Share of the predictions with the same likeliest token."""
    mean_logprob_difference: float
    """Mean absolute difference over the reference's likeliest 20 tokens. One that is
    no longer among the likeliest 20 counts as if it were the last of them."""
    max_logprob_difference: float
    median_same_tokens: float
    """Of 64: how many tokens of the continuation come before the first that differs."""


class EffectReplica:
    """One replica, started and ended again and again on one disk tier."""

    def __init__(self, group: ProcessGroup, model_dir: Path, work: Path, *, chunks: int) -> None:
        """``chunks``: of each prompt."""
        self.disk = work / "disk"
        self._group = group
        self._work = work
        self._prompt_tokens = chunks * _CHUNK_TOKENS + _TAIL_TOKENS
        self._model_dir = model_dir
        self._tiers: ReplicaTiers | None = None

    def start(self) -> None:
        """Start it, and return when it serves."""
        port, agent_port = free_ports(2)
        config = self._work / "replica.yaml"
        settings = {
            **_LAYOUT,
            "local_disk": str(self.disk),
            "max_local_disk_size": 4.0,
            "lmcache_instance_id": _MODEL,
            "lmcache_worker_port": agent_port,
        }
        config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
        platform = find_platform()
        vllm_args = [
            *platform_arguments(platform, of=1),
            *("--model", str(self._model_dir), "--served-model-name", _MODEL),
            *("--port", str(port), "--block-size", "128"),
            *("--max-model-len", str(self._prompt_tokens + 2 * _SAID_TOKENS)),
        ]
        url = f"http://127.0.0.1:{port}"
        self._group.start(
            _MODEL,
            replica_command(config, vllm_args),
            replica_environment(platform, 0, of=1),
            self._work / "replica.log",
        )
        self._group.wait_ready(_MODEL, f"{url}/health", REPLICA_READY_TIMEOUT_S)
        agent_url = f"http://127.0.0.1:{agent_port}"
        self._tiers = ReplicaTiers(
            name=_MODEL, url=url, agent_url=agent_url, model=_MODEL, disk=self.disk
        )

    def stop(self) -> None:
        """End it in order; its disk tier is then anybody's."""
        self._group.stop(_MODEL)
        self._tiers = None

    @property
    def tiers(self) -> ReplicaTiers:
        """Return the running replica."""
        if self._tiers is None:
            raise BenchError("the replica is not running")
        return self._tiers

    def chunk_bytes(self) -> int:
        """Return how many bytes of KV a chunk has."""
        return int(call(f"{self.tiers.agent_url}/info")["chunk_bytes"])

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        """Return prompts of real text, all of one length."""
        return [
            self._tokens(real_text(2 * self._prompt_tokens, seed=seed + number))
            for number in range(count)
        ]

    def _tokens(self, text: str) -> list[int]:
        body = {"model": _MODEL, "prompt": text}
        tokens: list[int] = call(f"{self.tiers.url}/tokenize", body)["tokens"]
        if len(tokens) < self._prompt_tokens:
            raise BenchError(f"{len(tokens)} tokens of text instead of {self._prompt_tokens}")
        return tokens[: self._prompt_tokens]

    def compute(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Have the prompts computed and written to disk; return their continuations."""
        said = [self._say(prompt, {}) for prompt in prompts]
        for prompt in prompts:
            self.tiers.leave_on_disk(prompt, drop_page_cache=False)
        return said

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        *,
        from_cache: bool = True,
    ) -> Answers:
        """Return predictions along the given continuations, and own ones.

        Without ``from_cache`` every prediction is computed from nothing.
        """
        predictions, said = [], []
        for number, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
            for length in range(len(continuation)):
                salt = {} if from_cache else {"cache_salt": f"{number}-{length}"}
                predictions.append(self._predict([*prompt, *continuation[:length]], salt))
            said.append(self._say(prompt, {} if from_cache else {"cache_salt": f"{number}"}))
        return Answers(predictions, said)

    def _predict(self, tokens: Sequence[int], salt: Mapping[str, str]) -> Prediction:
        more = {"logprobs": _TOP, "return_tokens_as_token_ids": True, **salt}
        answer = self._complete(tokens, max_tokens=1, **more)
        details = answer["usage"]["prompt_tokens_details"] or {}
        cached_tokens = details.get("cached_tokens") or 0
        if cached_tokens != (0 if salt else self._prompt_tokens - _TAIL_TOKENS):
            raise BenchError(f"{cached_tokens} tokens came from the cache")
        prediction: Prediction = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        return prediction

    def _say(self, tokens: Sequence[int], salt: Mapping[str, str]) -> list[int]:
        answer = self._complete(tokens, max_tokens=_SAID_TOKENS, return_token_ids=True, **salt)
        said: list[int] = answer["choices"][0]["token_ids"]
        return said

    def _complete(self, tokens: Sequence[int], **more: object) -> dict[str, Any]:
        body = {
            "model": _MODEL,
            "prompt": list(tokens),
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        answer: dict[str, Any] = call(f"{self.tiers.url}/v1/completions", body, timeout_s=300)
        return answer


def compare(reference: Answers, other: Answers) -> Effect:
    """Return how far ``other`` is from ``reference``."""
    pairs = list(zip(reference.predictions, other.predictions, strict=True))
    differences = [each for a, b in pairs for each in _differences(a, b)]
    return Effect(
        predictions=len(pairs),
        same_best_token=statistics.mean(_best(a) == _best(b) for a, b in pairs),
        mean_logprob_difference=statistics.mean(differences),
        max_logprob_difference=max(differences),
        median_same_tokens=statistics.median(
            common_prefix(a, b) for a, b in zip(reference.said, other.said, strict=True)
        ),
    )


def _best(prediction: Prediction) -> str:
    return max(prediction, key=prediction.__getitem__)


def _differences(reference: Prediction, other: Prediction) -> list[float]:
    """Return by how much each of the reference's tokens became more or less likely."""
    least = min(other.values())
    return [abs(logprob - other.get(token, least)) for token, logprob in reference.items()]
