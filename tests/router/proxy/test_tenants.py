"""No tenant is matched with another's prefix: salts, adapters, models and media."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config.settings import ReplicaConfig, RouterConfig
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.kv_events import BlocksStored, FirstBlocks, KvBatch
from router.index.prompt_keys import KeyShape, KvTier
from router.prompt.prompt import Prompt
from router.prompt.prompt_reader import PromptReader
from tests.router.fleet.helpers import place as decide
from tests.router.prompt.helpers import LONG, VISION, image
from tests.router.prompt.tokenizer_makers import llama3, write_model
from warmroute_common.keys import DEFAULT_SEED, HashScheme, key64

SCHEME = HashScheme("xxhash")
ADAPTERS = {"adapter": "/adapters/a", "other": "/adapters/b", "image": "/adapters/i"}

# One conversation: what is left is who asks, and how.
TENANTS = st.fixed_dictionaries(
    {
        "model": st.sampled_from([None, "base", "adapter", "other"]),
        "cache_salt": st.sampled_from([None, "s", "salt", "base", "adapter"]),
        "picture": st.sampled_from([None, b"one", b"two"]),
    }
)
CHAT = "/v1/chat/completions"
# Chats by these are the same tokens; /v1/responses begins with one more.
ENDPOINTS = st.sampled_from(
    [(CHAT, CHAT), (CHAT, "/v1/messages"), ("/v1/responses", "/v1/responses")]
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    return PromptReader.load(write_model(tmp_path_factory.mktemp("model") / "m", llama3(), VISION))


def prompt_of(reader: PromptReader, tenant: Mapping[str, Any], endpoint: str) -> Prompt:
    picture = tenant["picture"]
    parts: list[dict[str, Any]] = [{"type": "text", "text": LONG}]
    if picture is not None:
        parts = [image(picture), *parts]
        if endpoint == "/v1/messages":
            url = parts[0]["image_url"]["url"]
            parts[0] = {"type": "image", "source": {"type": "url", "url": url}}
        if endpoint == "/v1/responses":
            parts[0] = {"type": "input_image", "image_url": parts[0]["image_url"]["url"]}
    messages = [{"role": "user", "content": LONG}, {"role": "user", "content": parts}]
    body: dict[str, Any] = {"input" if endpoint == "/v1/responses" else "messages": messages}
    body |= {key: tenant[key] for key in ("model", "cache_salt") if tenant[key] is not None}
    return reader.read_now(endpoint, body)


def keys_of(prompt: Prompt, adapters: Mapping[str, str]) -> tuple[list[bytes], list[int]]:
    return prompt.chain(SCHEME, 16, lora=prompt.lora(adapters)), prompt.text_chain()


@settings(max_examples=150)
@given(one=TENANTS, other=TENANTS, endpoints=ENDPOINTS, same_paths=st.booleans())
def test_equal_tenants_share_all_and_others_nothing(
    reader: PromptReader,
    one: dict[str, Any],
    other: dict[str, Any],
    endpoints: tuple[str, str],
    same_paths: bool,
) -> None:
    prompts = [prompt_of(reader, one, endpoints[0]), prompt_of(reader, other, endpoints[1])]
    paths = [ADAPTERS, ADAPTERS if same_paths else {n: p + "2" for n, p in ADAPTERS.items()}]
    used = [prompt.lora(each) for prompt, each in zip(prompts, paths, strict=True)]
    (tokens, texts), (other_tokens, other_texts) = map(keys_of, prompts, paths)
    assert tokens
    assert other_tokens
    if (one["cache_salt"], used[0]) == (other["cache_salt"], used[1]):
        shorter = min(len(tokens), len(other_tokens))
        assert tokens[:shorter] == other_tokens[:shorter]
    else:
        assert not set(tokens) & set(other_tokens)
    apart = ("model", "cache_salt")
    if any(one[key] != other[key] for key in apart):
        assert not set(texts) & set(other_texts)
        assert prompts[0].affinity != prompts[1].affinity
    elif one["picture"] == other["picture"]:
        assert texts == other_texts
        assert prompts[0].affinity == prompts[1].affinity
    else:
        # The same long text is before the pictures; from them on nothing is shared.
        same = [a == b for a, b in zip(texts, other_texts, strict=False)]
        assert same == sorted(same, reverse=True)
        assert not all(same)
    reader.memo.check()


@pytest.mark.parametrize(
    ("model", "content", "used"),
    [
        ("adapter", "text", ("adapter", "/adapters/a")),
        ("base", "text", None),
        ("base", [image()], ("image", "/adapters/i")),
        ("adapter", [image()], ("adapter", "/adapters/a")),
        (None, [image()], ("image", "/adapters/i")),
    ],
)
def test_the_adapter_is_the_one_that_vllm_takes(
    model: str | None, content: Any, used: tuple[str, str] | None
) -> None:
    body = {"messages": [{"role": "user", "content": content}], "model": model}
    prompt = PromptReader(None).read_now(CHAT, body)
    assert prompt.lora(ADAPTERS) == used
    assert prompt.lora({}) is None


def test_two_adapters_for_kinds_of_content_are_none() -> None:
    content = [image(), {"type": "text", "text": "a"}]
    body = {"messages": [{"role": "user", "content": content}]}
    prompt = PromptReader(None).read_now(CHAT, body)
    assert prompt.lora({"image": "/i", "text": "/t"}) is None
    assert (
        PromptReader(None).read_now("/v1/responses", body | {"input": "a"}).lora({"image": "/i"})
        is None
    )


def fleet() -> Fleet:
    config = RouterConfig(
        replicas=tuple(ReplicaConfig(url=f"http://r{n}", instance_id=f"r{n}") for n in range(2))
    )
    made = Fleet(config)
    for n, replica in enumerate(made.replicas.values()):
        made.up(replica.id)
        made.set_models(replica.id, {"base": None, "adapter": f"/adapters/{n}"})
        made.following_kv(replica.id)
    return made


def show_shape(made: Fleet, replica: Replica, salt: str | None = None) -> None:
    """Let a replica's first event show how it makes its keys."""
    tokens = list(range(16))
    salted = (("cache_salt", salt),) if salt else None
    keys = [key64(key) for key in SCHEME.chain(tokens, 16, first_extra_keys=salted)]
    made.apply_kv(replica.id, KvBatch(0, 0.0, [FirstBlocks(keys, tokens, 16, salt)]), 0.0)


def place(made: Fleet, prompt: Prompt, now_s: float = 0.0) -> dict[str, int]:
    decision = decide(made, prompt, now_s, model=prompt.model)
    return {each.replica_id: each.matched for each in decision.candidates}


def completion(reader: PromptReader, **more: Any) -> Prompt:
    return reader.read_now("/v1/completions", {"prompt": LONG, **more})


def test_a_replica_is_matched_by_its_own_adapters_path(reader: PromptReader) -> None:
    made = fleet()
    for replica in list(made.replicas.values()):
        show_shape(made, replica)
        assert replica.shape == KeyShape(scheme=SCHEME, block_tokens=16)
    prompt = completion(reader, model="adapter")
    lora = ("adapter", "/adapters/1")
    keys = [key64(key) for key in prompt.chain(SCHEME, 16, lora=lora)]
    for replica_id in ("r0", "r1"):  # r0 holds what another path gave: of no use to it
        made.apply_kv(replica_id, KvBatch(1, 0.0, [BlocksStored(KvTier.GPU, keys)]), 0.0)
    assert place(made, prompt) == {"r0": 0, "r1": len(keys) * 16}
    assert place(made, completion(reader, model="base")) == {"r0": 0, "r1": 0}
    assert place(made, completion(reader, model="adapter", cache_salt="s")) == {"r0": 0, "r1": 0}
    made.set_models("r1", {"base": None, "adapter": "/adapters/new"})
    assert place(made, prompt) == {"r0": 0, "r1": 0}


@pytest.mark.parametrize("shaped", [True, False])
def test_what_was_sent_for_one_tenant_is_not_believed_for_another(
    reader: PromptReader, shaped: bool
) -> None:
    made = fleet()
    for replica in list(made.replicas.values()):
        if shaped:
            show_shape(made, replica)
    tenants: list[dict[str, str]] = [
        {"model": "base"},
        {"model": "base", "cache_salt": "a"},
        {"model": "base", "cache_salt": "b"},
        {"model": "adapter"},
        {"model": "adapter", "cache_salt": "a"},
    ]
    for tenant in tenants:
        prompt = completion(reader, **tenant)
        assert not any(place(made, prompt).values()), tenant
        decision = decide(made, prompt, model=prompt.model)
        made.start(decision, 0.0)
        assert any(place(made, completion(reader, **tenant)).values()), tenant


def test_salted_events_show_the_shape_and_strange_ones_do_not_hide_it(
    reader: PromptReader,
) -> None:
    made = fleet()
    replica = made.replicas["r0"]
    strange = FirstBlocks([1], list(range(16)), 16, "salt")
    made.apply_kv("r0", KvBatch(0, 0.0, [strange]), 0.0)
    assert replica.shape is None
    assert replica.shape_problem is None
    show_shape(made, replica, "salt")
    assert replica.shape == KeyShape(scheme=SCHEME, block_tokens=16)
    assert SCHEME.seed == DEFAULT_SEED
