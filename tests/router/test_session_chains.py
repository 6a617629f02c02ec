"""The chunks of sessions' last prompts: bounded in bytes and time."""

from hypothesis import given
from hypothesis import strategies as st

from router.staging.session_chains import SessionChains

KEYS = [bytes([n]) * 32 for n in range(4)]


def test_a_chain_comes_back_as_it_was() -> None:
    chains = SessionChains(10_000, ttl_s=60.0)
    chains.note("s", "one", KEYS, 1.0)
    chain = chains.get("s", 2.0)
    assert chain is not None
    assert (chain.replica_id, chain.keys()) == ("one", tuple(KEYS))
    assert chains.get("t", 2.0) is None


def test_the_latest_prompt_counts() -> None:
    chains = SessionChains(10_000, ttl_s=60.0)
    chains.note("s", "one", KEYS, 1.0)
    chains.note("s", "two", KEYS[:1], 2.0)
    chain = chains.get("s", 2.0)
    assert chain is not None
    assert (chain.replica_id, chain.keys()) == ("two", tuple(KEYS[:1]))
    chains.note("s", "one", (), 3.0)
    assert chains.get("s", 3.0) is None
    assert (len(chains), chains.used_bytes) == (0, 0)


def test_chains_expire() -> None:
    chains = SessionChains(10_000, ttl_s=60.0)
    chains.note("s", "one", KEYS, 1.0)
    assert chains.get("s", 60.9) is not None
    assert chains.get("s", 61.0) is None
    chains.note("t", "one", KEYS, 61.0)
    assert len(chains) == 1
    assert chains.evicted == 0


def test_the_least_recently_used_makes_room() -> None:
    chains = SessionChains(1000, ttl_s=60.0)
    for session in ("a", "b", "a", "c"):
        chains.note(session, "one", KEYS, 1.0)
    assert chains.get("b", 1.0) is None
    assert chains.get("a", 1.0) is not None
    assert chains.evicted == 1
    chains.check()


def test_what_is_too_large_for_the_table_is_not_kept() -> None:
    chains = SessionChains(100, ttl_s=60.0)
    chains.note("s", "one", KEYS, 1.0)
    assert len(chains) == 0
    chains.check()


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 30), st.floats(0, 20)), max_size=40
    ),
    st.integers(0, 3000),
)
def test_it_never_takes_more_than_it_may(
    notes: list[tuple[str, int, float]], max_bytes: int
) -> None:
    chains, now_s = SessionChains(max_bytes, ttl_s=30.0), 0.0
    for session, count, passed_s in notes:
        now_s += passed_s
        chains.note(session, "one", [bytes(32)] * count, now_s)
        chains.check()
