"""What the spec refuses at start, and what it tells vLLM."""

import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cacheengine.helpers import wait_until

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

BLOCK_TOKENS = 128
# Other processes, and other tests, have regions in /dev/shm, too.
ENGINE_ID = f"spec-{uuid.uuid4()}"


MODEL = {
    "model": "a/model",
    "weights": "w",
    "options": "o",
    "build": "b",
    "attention": "A",
    "pages": "p",
    "hash_algorithm": "sha256_cbor",
}
"""What the connector reports of a model."""


def offloading_config(
    *,
    groups: int = 1,
    blocks_per_chunk: int = 2,
    model: dict[str, str] | None = MODEL,
) -> Any:
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=BLOCK_TOKENS, layer_names=(f"layer{i}",), group_id=i
            )
            for i in range(groups)
        ),
        worker_kv_bytes_per_block=BLOCK_TOKENS * 8192,
        enable_kv_cache_events=True,
        extra_config={
            "warmroute": {"kv_events_port": 5557},
            **({"warmroute_model": model} if model else {}),
        },
        engine_id=ENGINE_ID,
        model=OffloadingModelConfig(name="a/model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(
            tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=blocks_per_chunk
        ),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache configuration that vLLM's process would find."""
    path = tmp_path / "instance.yaml"
    path.write_text("chunk_size: 256\nmax_local_cpu_size: 0.01\nlmcache_worker_port: 0\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    return path


def test_the_pool_has_the_configured_size(configured: Path) -> None:
    from cacheengine.connector.spec import WarmrouteSpec

    spec = WarmrouteSpec(offloading_config())
    assert spec.kv_bytes_per_chunk == 256 * 8192
    assert spec.num_chunks == int(0.01 * 1024**3) // (256 * 8192)
    # Generated tokens are stored too.
    assert spec.offload_prompt_only is False
    assert spec._layout().hash_algorithm == "sha256_cbor"


def test_generated_tokens_may_be_left_out(configured: Path) -> None:
    from cacheengine.connector.spec import WarmrouteSpec

    configured.write_text(configured.read_text() + "save_decode_cache: false\n")
    assert WarmrouteSpec(offloading_config()).offload_prompt_only is True


@pytest.mark.parametrize(
    ("config", "lossy"),
    [
        ("", ""),
        ("remote_serde: cachegen", ""),  # nothing is written through it
        ("remote_url: redis://h:1\nremote_serde: lossless", ""),
        ("remote_url: redis://h:1\nremote_serde: cachegen", "cachegen"),
    ],
)
def test_lossy_kv_never_meets_exact_kv(configured: Path, config: str, lossy: str) -> None:
    from cacheengine.connector.spec import WarmrouteSpec

    configured.write_text(configured.read_text() + config + "\n")
    assert WarmrouteSpec(offloading_config())._layout().lossy == lossy


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ("", {"groups": 2}, "2 KV cache groups .* --disable-hybrid-kv-cache-manager"),
        ("", {"blocks_per_chunk": 4}, "chunk_size: 256 tokens .* but 512 in vLLM's"),
        ("", {"model": None}, "kv_connector: the cache engine works only with WarmrouteConnector"),
        (
            "",
            {"model": {**MODEL, "hash_algorithm": "xxhash"}},
            "single_tenant: is false, .*xxhash one can construct a prompt .*; start vLLM with "
            "sha256 or sha256_cbor, or set single_tenant: true",
        ),
        ("max_local_cpu_size: 0.001", {}, "max_local_cpu_size: 0.001 GB does not hold one chunk"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    configured: Path, config: str, changes: dict[str, Any], message: str
) -> None:
    from cacheengine.connector.spec import WarmrouteSpec

    if config:
        configured.write_text(f"chunk_size: 256\n{config}\n")
    with pytest.raises(ValueError, match=message):
        WarmrouteSpec(offloading_config(**changes))


def test_one_tenant_may_use_keys_that_can_be_forged(configured: Path) -> None:
    from cacheengine.connector.spec import WarmrouteSpec

    configured.write_text(configured.read_text() + "single_tenant: true\n")
    spec = WarmrouteSpec(offloading_config(model={**MODEL, "hash_algorithm": "xxhash"}))
    assert spec._layout().hash_algorithm == "xxhash"


@pytest.mark.parametrize("name", sorted(MODEL))
def test_whatever_the_connector_tells_of_a_model_is_in_the_fingerprint(
    configured: Path, name: str
) -> None:
    from cacheengine.connector.spec import WarmrouteSpec

    changed = "sha256" if name == "hash_algorithm" else "another"
    layouts = [
        WarmrouteSpec(offloading_config(model=model))._layout()
        for model in (MODEL, {**MODEL, name: changed})
    ]
    assert layouts[0].fingerprint() != layouts[1].fingerprint()


@pytest.fixture
def worker_memory(configured: Path) -> Iterator[None]:
    """The pool as a worker of vLLM has mapped it before the scheduler does."""
    from cacheengine.connector.spec import WarmrouteSpec

    region = WarmrouteSpec(offloading_config())._open_region(rank=0)
    yield
    region.cleanup()


def test_a_scheduler_that_shares_no_memory_with_its_workers_is_refused(configured: Path) -> None:
    from cacheengine.connector.spec import WarmrouteSpec

    with pytest.raises(ValueError, match="workers do not share /dev/shm with its scheduler"):
        WarmrouteSpec(offloading_config()).get_manager()
    assert not list(Path("/dev/shm").glob(f"*{ENGINE_ID}*"))


def test_a_data_parallel_rank_has_its_own_ports_and_name(configured: Path) -> None:
    from cacheengine.connector.spec import WarmrouteSpec

    configured.write_text(configured.read_text() + "lmcache_instance_id: one\n")
    config = offloading_config()
    # The third of all ranks is the second of its machine.
    parallel = replace(config.parallel, data_parallel_index=2, data_parallel_rank_local=1)
    spec = WarmrouteSpec(replace(config, parallel=parallel))
    assert spec.engine_config.lmcache_instance_id == "one_dp1"
    assert spec._identity(None).kv_events_port == 5559
    assert spec._layout() == WarmrouteSpec(config)._layout(), "ranks may share their chunks"


@pytest.mark.usefixtures("worker_memory")
def test_the_manager_ends_what_it_started(configured: Path) -> None:
    from cacheengine.connector.spec import WarmrouteSpec

    spec = WarmrouteSpec(offloading_config())
    manager = spec.get_manager()
    assert spec.get_manager() is manager
    assert not list(Path("/dev/shm").glob(f"*{ENGINE_ID}*")), "the name is gone at once"
    manager.shutdown()


def _is_checked(engine: Any) -> bool:
    return bool(engine.stats().cpu_held_bytes == 0)


@pytest.mark.parametrize(
    ("model", "is_kept"), [(MODEL, True), ({**MODEL, "weights": "other"}, False)]
)
def test_a_kept_pool_is_served_by_the_next_manager_of_the_same_model(
    configured: Path, model: dict[str, str], is_kept: bool
) -> None:
    from cacheengine.connector.spec import WarmrouteSpec

    directory = Path(f"/dev/shm/test-{uuid.uuid4()}")
    configured.write_text(configured.read_text() + f"keep_cpu_dir: {directory}\n")
    try:
        counts = []
        for each in (MODEL, model):
            spec = WarmrouteSpec(offloading_config(model=each))
            worker = spec._open_region(rank=0)
            manager = spec.get_manager()
            engine = manager.engine
            wait_until(partial(_is_checked, engine))
            counts.append(engine.stats().cpu_used_bytes // spec.kv_bytes_per_chunk)
            if not counts[-1]:
                reservation = engine.prepare_store([b"a" * 32, b"b" * 32])
                engine.complete_store(reservation.keys)
            manager.shutdown()
            worker.cleanup()
        assert counts == [0, 2 if is_kept else 0]
    finally:
        shutil.rmtree(directory)


@pytest.mark.usefixtures("worker_memory")
@pytest.mark.parametrize("hangs", [True, False])
def test_the_end_takes_less_than_vllm_grants_and_most_of_it_is_for_writes(
    configured: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    from cacheengine.agent.agent import Agent
    from cacheengine.connector import spec as made
    from cacheengine.engine.engine import CacheEngine
    from cacheengine.transfer.transfer_server import TransferServer

    took: dict[str, float] = {}
    now_s = [1000.0]

    def wrapped(real: Any) -> Any:
        def stop(self: Any, timeout_s: float) -> None:
            now_s[0] += timeout_s if hangs else 0.0
            real(self)

        return stop

    real_close = CacheEngine.close

    def close(self: CacheEngine, *, drain_s: float) -> None:
        took["drain"] = drain_s
        took["end"] = drain_s / 2
        real_close(self)

    configured.write_text(configured.read_text() + "distributed_url: localhost:0\n")
    manager = made.WarmrouteSpec(offloading_config()).get_manager()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now_s[0])
        patch.setattr(CacheEngine, "close", close)
        patch.setattr(Agent, "stop", wrapped(Agent.stop))
        patch.setattr(TransferServer, "stop", wrapped(TransferServer.stop))
        manager.shutdown()
    spent_s = now_s[0] - 1000
    assert took["drain"] >= 1.5
    assert spent_s + took["drain"] + took["end"] <= made._SHUTDOWN_S < 5


@pytest.mark.usefixtures("worker_memory")
def test_other_replicas_are_served_where_distributed_url_says(configured: Path) -> None:
    import threading

    from cacheengine.connector.spec import WarmrouteSpec

    configured.write_text(configured.read_text() + "distributed_url: localhost:0\n")
    spec = WarmrouteSpec(offloading_config())
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"kv-serve", "kv-agent"}
    manager = spec.get_manager()
    assert {"kv-serve", "kv-agent"} <= {thread.name for thread in threading.enumerate()}
    manager.shutdown()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"kv-serve", "kv-agent"}


@pytest.mark.usefixtures("worker_memory")
def test_a_replica_asks_for_the_fleet_secret_at_both_ports(
    configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its process has it: from the environment, by the names that a router knows, too."""
    import urllib.error
    import urllib.request

    from cacheengine.agent.agent import Agent
    from cacheengine.connector import spec as made
    from cacheengine.transfer import protocol
    from cacheengine.transfer.protocol import Channel
    from cacheengine.transfer.transfer_server import TransferServer

    started: list[Agent | TransferServer] = []
    monkeypatch.setattr(Agent, "start", _noted(Agent.start, started))
    monkeypatch.setattr(TransferServer, "start", _noted(TransferServer.start, started))
    monkeypatch.setenv("WARMROUTE_FLEET_SECRET", "known-to-the-fleet-alone")
    configured.write_text(configured.read_text() + "distributed_url: localhost:0\n")
    manager = made.WarmrouteSpec(offloading_config()).get_manager()
    server, agent = started
    assert agent.address is not None
    assert server.address is not None
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen("http://{}:{}/info".format(*agent.address), timeout=20)
    channel = Channel.connect(server.address, timeout_s=20, connect_s=20)
    with pytest.raises(
        protocol.TransferRefusedError, match="the fleet secret: this replica requires it"
    ):
        protocol.greet(channel, "f" * 32, 32, None)
    channel.close()
    manager.shutdown()


def _noted(start: Any, started: list[Any]) -> Any:
    def noting(self: Any) -> None:
        start(self)
        started.append(self)

    return noting
