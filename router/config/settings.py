"""The router's settings: what each means, its unit, its default, its bounds.

The classes are the schema (`router.config.schema` reads them). Sizes here are in
bytes and times in seconds, as the names say; only the engine's own file, which
keeps LMCache's keys, has sizes in GB.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal
from urllib.parse import urlsplit

from router.config.breaker import BreakerConfig
from router.config.clients import AccessConfig, CorsConfig, ReplicaTlsConfig, TlsConfig
from router.config.discovery import DiscoveryConfig
from router.config.observability import RequestLogConfig, TracingConfig
from router.config.schema import setting

MIB: Final = 1 << 20

PolicyName = Literal["ttft", "longest-prefix", "session", "least-loaded", "round-robin"]
PreCachingHash = Literal[
    "builtin", "sha256", "sha256_cbor", "sha256_cbor_64bit", "xxhash", "xxhash_cbor"
]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """One replica: only ``url`` is needed, the rest is found out or done without."""

    url: str
    """Base URL of the OpenAI server, without ``/v1``."""
    instance_id: str | None = None
    """Its name; by default its agent's, else host:port."""
    agent_url: str | None = None
    """Base URL of the cache engine's agent; without one there is no prefetch."""
    lmcache: str | None = None
    """Base URL of the stock LMCache server (``--http-port``) that the replica uses."""
    kv_events: str | None = None
    """vLLM's event publisher, ``tcp://host:port``; by default the agent's ``/info`` says."""
    kv_replay: str | None = None
    """vLLM's replay endpoint, ``tcp://host:port``; by default the agent's ``/info`` says."""
    api_key: str | None = field(default=None, repr=False)
    """Sent to this replica instead of the client's own Authorization."""
    hash_seed: str | None = None
    """PYTHONHASHSEED of a replica without an agent; by default found out from its events, but
    not for the keys of LMCache inside it (``lmcache_workers``)."""

    @property
    def name(self) -> str:
        """The name to use until the agent has told one: instance_id, else host:port."""
        return self.instance_id or urlsplit(self.url).netloc.rpartition("@")[2]


@dataclass(frozen=True, kw_only=True)
class RatesConfig:
    """Where the cost model starts from; every rate is learned per replica from then on."""

    prefill_tokens_per_s: float = setting(8_000.0, above=0)
    """Tokens of a prompt computed a second, with nothing else running."""
    cpu_load_bytes_per_s: float = setting(10e9, above=0)
    """From CPU RAM to the GPU."""
    disk_bytes_per_s: float = setting(1e9, above=0)
    """From disk to CPU RAM."""
    remote_bytes_per_s: float = setting(1e9, above=0)
    """From the remote store to CPU RAM."""
    peer_bytes_per_s: float = setting(1e9, above=0)
    """From another replica's CPU RAM."""
    kv_bytes_per_token: float = setting(100e3, above=0)
    """Size of a token's KV; an agent tells its replica's."""
    decode_slowdown: float = setting(0.02, at_least=0)
    """How much one running decode stretches a prefill beside it (0.02: by 2%)."""


@dataclass(frozen=True, kw_only=True)
class PrefetchConfig:
    """Promoting disk and remote KV, and copying other replicas', before a request is forwarded."""

    enabled: bool = True
    """False: replicas do by themselves what they do, and nothing is copied."""
    wait_cap_s: float = setting(2.0, at_least=0)
    """The longest that a request is held back for its prefetch or copy."""
    pin_s: float = setting(10.0, above=0)
    """How long promoted or copied KV is kept from eviction, for the request it was brought for."""


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Holding requests in the router until a replica can soon begin with them.

    Only the policy ``ttft`` holds any: the others, which predict nothing, send
    at once.
    """

    enabled: bool = True
    """False: every request is sent at once."""
    max_waiting: int = setting(4096, at_least=0)
    """Requests held at once; one more is refused with 429."""
    max_wait_s: float = setting(60.0, above=0)
    """The longest that one is held, unless its client waits less; then 429."""
    dispatch_ahead_s: float = setting(4.0, at_least=0)
    """How much predicted work may lie before a request when it is sent: enough that
    a replica never idles, little so that a shorter request need not wait behind it."""
    ageing: float = setting(0.5, above=0)
    """Seconds of predicted work that a second of waiting makes up for in the order,
    which is shortest first. Lower favours the short ones, higher the early ones."""


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Keeping a session on the replica that knows it."""

    header: str = "x-session-id"
    """Request header that names a session; else the body's ``prompt_cache_key``, ``session_id`` or
    ``user`` does."""
    max_sessions: int = setting(100_000, at_least=1)
    """Sessions whose homes are remembered; the longest unused are forgotten first."""
    ttl_s: float = setting(3600.0, above=0)
    """How long after its last request a session's home is remembered."""


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """How much the router remembers of what replicas hold."""

    max_keys: int = setting(4_000_000, at_least=1)
    """Block keys that are remembered, of all replicas together; of more, the oldest go."""
    speculative_ttl_s: float = setting(30.0, above=0)
    """How long a prefix just routed counts as held, unless an event confirms it."""
    history_ttl_s: float = setting(600.0, above=0)
    """The same for replicas that tell nothing."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How prompts become the tokens that the replicas see."""

    path: str | None = None
    """Directory of the model's tokenizer; by default the agents' ``/info`` says."""
    memo_bytes: int = setting(64 * MIB, at_least=0)
    """Texts and tokens kept, so that a conversation's next turn costs its new text only."""
    chat_template: str | None = None
    """A template file, where the replicas run with ``--chat-template``."""


@dataclass(frozen=True, kw_only=True)
class TimeoutsConfig:
    """How long to wait, for what."""

    connect_s: float = setting(5.0, above=0)
    """For a connection to a replica."""
    first_byte_s: float | None = setting(None, above=0)
    """From sending the request to the first byte of the answer; unlimited by default,
    since a long prompt on a busy replica may rightly take minutes."""
    stream_idle_s: float | None = setting(300.0, above=0)
    """How long an answer that has begun may rest, because its replica says nothing more or its
    client reads nothing; then it is ended. ``null`` for ever."""
    health_interval_s: float = setting(2.0, above=0)
    """How often each replica is asked whether it is well."""
    health_timeout_s: float = setting(2.0, above=0)
    """How long its answer may take."""
    body_s: float = setting(60.0, above=0)
    """How long a request's body may take to come whole; then 408."""
    idle_s: float = setting(75.0, above=0)
    """After which a client's connection is closed that is between requests, or still sends a
    request's headers. Longer than what load balancers keep one for, 60 s mostly: else they
    send a request into a connection that is just being closed."""
    leave_s: float | None = setting(None, at_least=0)
    """How long the router still takes requests after SIGTERM, while ``/health`` says 503 and each
    answer that its connection closes: as long as load balancers need to notice. By default 5 s
    where other machines reach it, none on loopback; none after SIGINT (Ctrl-C) either."""
    drain_s: float = setting(30.0, at_least=0)
    """How long running requests may go on after that."""


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """LMCache's controller, for moving, pinning and clearing KV by hand or program.

    Any program that reaches its ports can drop every replica's KV: without a
    ``secret`` or an admin key the API listens on this machine's loopback interface only.
    """

    host: str = "127.0.0.1"
    """Where the API and the monitor listen; replicas on other machines must reach it."""
    port: int = setting(9000, at_least=0, at_most=65535)
    """Of the API; 0 picks a free port (it is printed)."""
    monitor_port: int = setting(9001, at_least=0, at_most=65535)
    """Where replicas register: their ``controller_url``."""
    secret: str | None = field(default=None, repr=False)
    """Asked of every caller of the API, as the password of its URL or as a bearer token; an
    admin key does as well."""


@dataclass(frozen=True, kw_only=True)
class LmcacheWorkersConfig:
    """LMCache inside vLLM (``LMCacheConnectorV1``), whose workers register here over ZeroMQ.

    A replica's ``instance_id`` is to be its ``lmcache_instance_id``.
    """

    unauthenticated_host: str = "127.0.0.1"
    """Where the three ports listen. LMCache's protocol knows no secret: each program that reaches
    them can make the router believe anything of these replicas' KV, and connect anywhere. Other
    than this machine's loopback interface: a private network's only."""
    pull_port: int = setting(8300, at_least=0, at_most=65535)
    """The workers' ``controller_pull_url``; 0 picks a free port, here and below (it is logged)."""
    reply_port: int = setting(8400, at_least=0, at_most=65535)
    """Their ``controller_reply_url``."""
    heartbeat_port: int = setting(8600, at_least=0, at_most=65535)
    """Told to them when they register."""
    timeout_s: float = setting(30.0, above=0)
    """After so long without a heartbeat a worker is forgotten: three times their
    ``lmcache_worker_heartbeat_time`` at least."""
    chunk_size: int = setting(256, at_least=1)
    """Theirs, and so is the next one."""
    pre_caching_hash_algorithm: PreCachingHash = "builtin"
    """All but the two SHA ones want the replica's ``hash_seed`` too."""


@dataclass(frozen=True, kw_only=True)
class PickerConfig:
    """The endpoint picker that a gateway asks (``warmroute picker``)."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "envoy_port": "delete it: Envoy asks at picker.port; generate its configuration again "
        "(warmroute picker --print-envoy)",
    }

    host: str = "127.0.0.1"
    """Where both ports listen. The gRPC port does not authenticate its callers."""
    port: int = setting(9002, at_least=0, at_most=65535)
    """Where the gateway calls it by gRPC; 0 picks a free port (it is printed)."""
    http_port: int = setting(9003, at_least=0, at_most=65535)
    """Of its own ``/health``, ``/metrics`` and ``/explain``."""
    certificate: str | None = None
    """A PEM file with its certificate, for gateways that call it by TLS; ``key`` beside it."""
    key: str | None = None
    """The PEM file of the certificate's key."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """All of ``router.yaml``."""

    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` for clients on other machines."""
    port: int = setting(8080, at_least=0, at_most=65535)
    """0 picks a free port (it is printed)."""
    replicas: tuple[ReplicaConfig, ...] = ()
    """At least one, unless ``discovery`` finds them."""
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    policy: PolicyName = "ttft"
    """``ttft``: the replica that answers soonest; the others are there to compare with."""
    max_body_bytes: int = setting(64 * MIB, at_least=1024)
    """Of one request; more is refused with 413."""
    max_bodies_bytes: int = setting(2048 * MIB, at_least=1024)
    """Of all requests that are being read or wait for their answer's beginning; then 503."""
    retries: int = setting(2, at_least=0, at_most=100)
    """How many other replicas a request that has not begun to be answered may try. Where none can
    take it, one that said ``Retry-After`` of at most 5 s is tried again."""
    model_aliases: dict[str, str] = field(default_factory=dict)
    """By further names that clients may use, the models that replicas get asked for instead."""
    passthrough: tuple[str, ...] = ()
    """Paths that are passed to replicas beside those of vLLM's APIs; ``/x/*``: all below."""
    cors: CorsConfig | None = None
    log_level: LogLevel = "info"
    """The least that is logged; no text of prompts and answers at any level."""
    request_log: RequestLogConfig = field(default_factory=RequestLogConfig)
    tracing: TracingConfig | None = None
    """Off without the section; on with it, be it empty (``tracing: {}``)."""
    rates: RatesConfig = field(default_factory=RatesConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    sessions: SessionConfig = field(default_factory=SessionConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    fleet_secret_file: str | None = None
    """File with the secret that replicas' agents ask for and show (their own
    ``fleet_secret_file``), or the variable WARMROUTE_FLEET_SECRET instead."""
    tls: TlsConfig | None = None
    """Off without the section: the router then speaks plain HTTP."""
    replica_tls: ReplicaTlsConfig = field(default_factory=ReplicaTlsConfig)
    shares_replicas: bool = False
    """Whether other routers or pickers send to these replicas too: then a session whose home is
    not known has it by rendezvous hashing, and replicas are asked how much they have to do."""
    picker: PickerConfig | None = None
    """Used by ``warmroute picker``, which has all defaults without the section."""
    controller: ControllerConfig | None = None
    """Off without the section; on with it, be it empty (``controller: {}``)."""
    lmcache_workers: LmcacheWorkersConfig | None = None
    """Off without the section; on with it, be it empty."""
    lmcache_coordinator: str | None = None
    """Base URL of a stock LMCache coordinator, where the servers report to that one."""
