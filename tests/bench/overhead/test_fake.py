"""Fake replicas: what they say is what an OpenAI server says."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import orjson
import pytest

from bench.overhead.cases import MODEL, PATH, SHORT_TOKENS, Case, body, slow
from bench.overhead.fake_replicas import (
    BLOCK_TOKENS,
    Connection,
    Known,
    Replica,
    StreamClock,
    Telling,
    events,
    expected,
    handlers,
    known_prompts,
    model_handlers,
    read_prompts,
    whole,
    write_prompts,
)
from router.index.kv_events import BlocksStored, FirstBlocks, KvEvent, KvEventReader, find_shape
from simulator.kv_event_publisher import KvEventPublisher
from simulator.openai_prompts import WORDS, make_tokenizer
from tests.bench.overhead.listening import listening
from warmroute_common.keys import HashScheme


@asynccontextmanager
async def replica(noted: list[bytes] | None = None) -> AsyncIterator[str]:
    kept: list[bytes] = [] if noted is None else noted
    made = Replica(
        clock=StreamClock.of_loop(), handlers=model_handlers("somewhere"), note=kept.append
    )
    async with listening(lambda: Connection(made)) as url:
        yield url


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=20)


@pytest.mark.parametrize("tokens", [SHORT_TOKENS, SHORT_TOKENS + 5])
async def test_a_stream_is_one_that_openais_client_reads_to_its_end(tokens: int) -> None:
    async with replica() as url, client(url) as asking:
        stream = await asking.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "?"}],
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    choices = [each.choices[0] for each in chunks if each.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(each.delta.content or "" for each in choices) == " word" * tokens
    assert [each.finish_reason for each in choices] == [None] * tokens + ["length"]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == tokens


async def test_a_whole_answer_is_one_that_openais_client_reads() -> None:
    async with replica() as url, client(url) as asking:
        answer = await asking.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "?"}]
        )
        models = [each.id async for each in asking.models.list()]
    assert answer.choices[0].message.content == " word" * SHORT_TOKENS
    assert answer.usage is not None
    assert answer.usage.total_tokens - answer.usage.prompt_tokens == SHORT_TOKENS
    assert models == [MODEL]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_slow_stream_has_an_event_in_each_part_whatever_its_length_is_called(
    name: str,
) -> None:
    asked = orjson.dumps({"model": MODEL, "stream": True, name: SHORT_TOKENS + 1})
    async with (
        replica() as url,
        aiohttp.ClientSession() as http,
        http.post(url + PATH, data=asked) as answer,
    ):
        parts = [part async for part, _ in answer.content.iter_chunks()]
    assert parts == events(SHORT_TOKENS + 1)


@pytest.mark.parametrize("case", [Case(prompt="1k", answer="whole", requests=1), slow("1k", 1, 20)])
async def test_the_bytes_of_an_answer_are_those_that_the_load_generator_expects(case: Case) -> None:
    noted: list[bytes] = []
    asked = body(case, [{"role": "user", "content": "?"}])
    async with replica(noted) as url, aiohttp.ClientSession() as http:
        async with http.post(url + PATH, data=asked) as answer:
            read = await answer.read()
        # The next request over the same connection.
        async with http.post(url + PATH, data=asked) as answer:
            assert await answer.read() == read
    assert read == expected(case.answer, case.tokens)
    assert noted == [asked, asked]


async def test_a_path_that_is_not_known_is_refused_and_the_connection_kept() -> None:
    async with replica() as url, aiohttp.ClientSession() as http:
        async with http.get(f"{url}/version") as answer:
            assert answer.status == 404
        async with http.get(f"{url}/health") as answer:
            assert (answer.status, await answer.read()) == (200, b"")


def test_the_usage_tells_nothing_of_cached_tokens() -> None:
    usages = [orjson.loads(whole(3))["usage"]]
    last = [line for line in events(3)[-1].split(b"\n\n") if b'"usage"' in line]
    usages += [orjson.loads(line.removeprefix(b"data: "))["usage"] for line in last]
    assert len(usages) == 2
    assert all("prompt_tokens_details" not in each for each in usages)


class ScriptedLoop:
    """A loop's clock and its one timer."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timer: tuple[float, object] | None = None

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, run: object) -> None:
        assert self.timer is None
        self.timer = (when_s, run)

    def run_until(self, end_s: float, late_s: float = 0.0) -> None:
        """Fire the timer whenever it is due, late by this much."""
        while self.timer is not None and self.timer[0] + late_s <= end_s + 1e-9:
            due_s, run = self.timer
            self.timer = None
            self.now_s = max(self.now_s, due_s + late_s + 1e-6)
            assert callable(run)
            run()
        self.now_s = max(self.now_s, end_s)


def stepped(clock: StreamClock, loop: ScriptedLoop, steps: int) -> list[float]:
    """Add a stream of this many events; return when they come."""
    came_s: list[float] = []

    def step() -> bool:
        came_s.append(loop.now_s)
        return len(came_s) < steps

    clock.add(step)
    return came_s


def test_streams_get_an_event_every_20_ms_each_from_where_it_began() -> None:
    loop = ScriptedLoop()
    clock = StreamClock(loop.time, loop.call_at)
    first = stepped(clock, loop, 3)
    loop.run_until(100.007)
    second = stepped(clock, loop, 2)
    loop.run_until(101)
    assert first == pytest.approx([100.020, 100.040, 100.060], abs=1.1e-3)
    assert second == pytest.approx([100.027, 100.047], abs=1.1e-3)


def test_without_streams_there_is_no_timer_and_it_comes_back_with_the_next() -> None:
    loop = ScriptedLoop()
    clock = StreamClock(loop.time, loop.call_at)
    stepped(clock, loop, 1)
    loop.run_until(103)
    assert loop.timer is None
    again = stepped(clock, loop, 1)
    loop.run_until(104)
    assert again == pytest.approx([103.020], abs=1.1e-3)


def test_a_late_timer_is_made_up_for_so_that_streams_take_their_time_and_no_more() -> None:
    loop = ScriptedLoop()
    clock = StreamClock(loop.time, loop.call_at)
    came_s = stepped(clock, loop, 10)
    loop.run_until(110, late_s=0.013)
    assert len(came_s) == 10
    assert came_s[-1] == pytest.approx(100.200, abs=0.015)


# --- replicas whose tokens and keys can be known


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


class Published(KvEventPublisher):
    """Keeps what is published; without sockets."""

    def __init__(self) -> None:
        self.events: list[list[KvEvent]] = []
        self._reader = KvEventReader()

    def publish(self, payload: bytes) -> None:
        """Read it as the router does."""
        self.events.append(list(self._reader.read(len(self.events), payload).events))


def turns(*words: int) -> list[bytes]:
    """Bodies of one conversation, with this many more words in each turn."""
    case = Case(prompt="1k", answer="piece", requests=len(words))
    said = [" ".join(WORDS[at : at + count]) for at, count in enumerate(words)]
    messages = [{"role": "user", "content": each} for each in said]
    return [body(case, messages[: at + 1]) for at in range(len(words))]


def test_a_prompts_event_shows_the_router_how_its_keys_are_made(tokenizer: Path) -> None:
    published = Published()
    (asked,) = turns(100)
    Telling(known_prompts([asked], tokenizer), published).note(asked)
    first, stored = published.events[0]
    assert isinstance(first, FirstBlocks)
    assert isinstance(stored, BlocksStored)
    shape = find_shape(first, None)
    assert shape is not None
    assert (shape.scheme, shape.block_tokens) == (HashScheme(), BLOCK_TOKENS)
    assert list(first.keys) == list(stored.keys)
    assert len(stored.keys) == 102 // BLOCK_TOKENS


def test_what_a_replica_holds_it_does_not_publish_again(tokenizer: Path) -> None:
    published = Published()
    bodies = turns(100, 60, 60)
    telling = Telling(known_prompts(bodies, tokenizer), published)
    for asked in (*bodies, bodies[-1]):
        telling.note(asked)
    stored = [
        each for batch in published.events for each in batch if isinstance(each, BlocksStored)
    ]
    every = [key for each in stored for key in each.keys]
    assert len(stored) == 3
    assert len(every) == len(set(every)) == (100 + 60 + 60 + 4) // BLOCK_TOKENS


def test_a_prompt_that_was_not_made_ready_is_an_error(tokenizer: Path) -> None:
    with pytest.raises(KeyError):
        Telling({}, Published()).note(b"{}")


def test_known_prompts_come_back_from_their_file(tmp_path: Path) -> None:
    prompts = {2**64 - 1: Known(b"\x01\0\0\0", b"\xff" * 8), 0: Known(b"", b"")}
    write_prompts(tmp_path / "known", prompts)
    assert read_prompts(tmp_path / "known") == prompts


async def test_a_telling_replica_names_its_tokenizer_and_proves_it(tokenizer: Path) -> None:
    stream = KvEventPublisher("127.0.0.1")
    stream.start()
    try:
        told: Mapping[bytes, object] = handlers(tokenizer, stream)
        answers = {path: handler for path, handler in told.items() if callable(handler)}
        models = orjson.loads(answers[b"/v1/models"](b""))
        assert models["data"][0]["root"] == str(tokenizer)
        assert orjson.loads(answers[b"/kv_event_sources"](b""))["0"]["endpoint"] == stream.endpoint
        asked = orjson.dumps({"prompt": f"{WORDS[7]} {WORDS[9]}"})
        assert orjson.loads(answers[b"/tokenize"](asked))["tokens"] == [7, 9]
        assert answers[b"/tokenize"](b"{}") is None
    finally:
        await stream.stop()
