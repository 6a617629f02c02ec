"""The router's settings: for each its meaning, unit, default and bounds.

The classes are the schema that files are read by (`warmroute_common.config_reader`), and the
docstrings below the fields are the reference in docs/configuration.md. Sizes are in bytes and
times in seconds, as the names say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal
from urllib.parse import urlsplit

from router.config.cost_weights import DEFAULT_WEIGHTS
from warmroute_common.addresses import without_password
from warmroute_common.config_reader import parse_date, setting

MIB: Final = 1 << 20

Waivable = Literal["access", "tls", "model_aliases", "cors"]
PolicyName = Literal["ttft", "longest-prefix", "session", "least-loaded", "round-robin"]
PreCachingHash = Literal[
    "builtin", "sha256", "sha256_cbor", "sha256_cbor_64bit", "xxhash", "xxhash_cbor"
]
PriorityName = Literal["high", "normal", "batch"]
LogLevel = Literal["debug", "info", "warning", "error"]
Scheme = Literal["http", "https"]
NixlRole = Literal["both", "prefill", "decode"]
PREFILLING_ROLES: Final = ("both", "prefill")
DECODING_ROLES: Final = ("both", "decode")


# --- replicas


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """One replica. Only ``url`` is required; the router finds out the rest or works without it."""

    url: str
    """Base URL of the OpenAI server, without ``/v1``."""
    instance_id: str | None = None
    """The replica's name. By default the name that its agent reports, else host:port."""
    agent_url: str | None = None
    """Base URL of the cache engine's agent. Without an agent nothing is prefetched."""
    lmcache: str | None = None
    """Base URL of the stock LMCache server (``--http-port``) that the replica uses."""
    kv_events: str | None = None
    """vLLM's event publisher, ``tcp://host:port``. By default the agent reports it."""
    kv_replay: str | None = None
    """vLLM's replay endpoint, ``tcp://host:port``. By default the agent reports it."""
    api_key: str | None = field(default=None, repr=False)
    """Sent to this replica instead of the client's own Authorization header."""
    api_key_file: str | None = None
    """A file with the ``api_key``."""
    hash_seed: str | None = None
    """PYTHONHASHSEED of a replica without an agent. By default the router derives it from the
    replica's events. It cannot derive it for LMCache inside vLLM (``lmcache_workers``)."""
    nixl_role: NixlRole | None = None
    """For a vLLM that runs with NixlConnector: whether it prefills prompts for other replicas,
    decodes prompts that others have prefilled, or both. With ``prefill`` it answers only if no
    other replica can."""

    @property
    def name(self) -> str:
        """The name until the agent reports one: instance_id, else host:port."""
        return self.instance_id or urlsplit(self.url).netloc.rpartition("@")[2]

    @property
    def public_url(self) -> str:
        """The URL for people and traces: without the user name and password."""
        return without_password(self.url)


@dataclass(frozen=True, kw_only=True)
class DnsConfig:
    """A DNS name whose addresses are replicas, such as a headless Kubernetes service."""

    name: str
    """The router resolves its A and AAAA records."""
    port: int = setting(8000, at_least=1, at_most=65535)
    """Port of the replicas."""
    scheme: Scheme = "http"
    """Protocol of the replicas."""
    interval_s: float = setting(10.0, at_least=0.1)
    """Time between two look-ups. A failed look-up changes nothing."""


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """Pods behind a Kubernetes service. The router watches the Kubernetes API for them.

    Ready pods join the fleet; terminating pods are drained. The router's service account needs
    permission to ``list`` and ``watch`` ``endpointslices`` of ``discovery.k8s.io`` in the
    namespace.
    """

    service: str | None = None
    """Name of the service. Set this or ``selector``."""
    selector: str | None = None
    """Labels of services, such as ``app=vllm,tier=gpu``, instead of one service's name."""
    namespace: str | None = None
    """Namespace of the services. By default the namespace of the router's pod."""
    port: int | None = setting(None, at_least=1, at_most=65535)
    """Port of the replicas. By default the service's only port, or the port named ``http``."""
    scheme: Scheme = "http"
    """Protocol of the replicas."""
    api_url: str | None = None
    """Base URL of the Kubernetes API. By default from the variables that every pod has."""
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    """File with the service account's token. If it does not exist, no token is sent."""
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    """PEM file of the authorities that sign the API's certificate. If it does not exist, the
    system's authorities are used."""


@dataclass(frozen=True, kw_only=True)
class DiscoveredConfig:
    """Settings that all discovered replicas share and that no source reports."""

    api_key: str | None = field(default=None, repr=False)
    """Sent to each replica instead of the client's own Authorization header."""
    api_key_file: str | None = None
    """A file with the ``api_key``."""
    agent_port: int | None = setting(None, at_least=1, at_most=65535)
    """Port of the cache engines' agents. Without it the router knows only agents that register."""
    kv_events_port: int | None = setting(None, at_least=1, at_most=65535)
    """Port of vLLM's event publisher. By default the agent or vLLM reports it."""
    kv_replay_port: int | None = setting(None, at_least=1, at_most=65535)
    """Port of vLLM's replay endpoint. By default the agent or vLLM reports it."""
    hash_seed: str | None = None
    """PYTHONHASHSEED of replicas without an agent. By default derived from their events."""
    nixl_role: NixlRole | None = None
    """For vLLMs that run with NixlConnector, as for a replica."""


@dataclass(frozen=True, kw_only=True)
class DiscoveryConfig:
    """Sources of replicas in addition to ``replicas``.

    A replica that several sources name is one replica.
    """

    registration: bool = False
    """Whether agents that register with the controller (``controller.monitor_port``) and report
    their ``openai_url`` add their replicas to the fleet. A replica stays as long as its agent
    sends heartbeats. If ``controller.secret`` or an admin key is set, that port requires it."""
    dns: tuple[DnsConfig, ...] = ()
    """Names that the router resolves."""
    kubernetes: KubernetesConfig | None = None
    """Off without the section."""
    each: DiscoveredConfig = field(default_factory=DiscoveredConfig)
    """Applies to replicas that DNS, Kubernetes or a registration names."""

    @property
    def is_on(self) -> bool:
        """Whether any source is configured."""
        return self.registration or bool(self.dns) or self.kubernetes is not None


# --- picking a replica


@dataclass(frozen=True, kw_only=True)
class RatesConfig:
    """Start values of the cost model's rates. Replicas then measure their own."""

    prefill_tokens_per_s: float = setting(8_000.0, above=0)
    """Prompt tokens that an otherwise idle replica computes per second."""
    cpu_load_bytes_per_s: float = setting(10e9, above=0)
    """From CPU RAM to the GPU."""
    disk_bytes_per_s: float = setting(1e9, above=0)
    """From disk to CPU RAM."""
    remote_bytes_per_s: float = setting(1e9, above=0)
    """From the remote store to CPU RAM."""
    peer_bytes_per_s: float = setting(1e9, above=0)
    """From another replica's CPU RAM."""
    pull_bytes_per_s: float = setting(10e9, above=0)
    """From another replica's GPU to the GPU, by NixlConnector."""
    kv_bytes_per_token: float = setting(100e3, above=0)
    """Size of one token's KV. An agent reports its replica's value."""
    decode_slowdown: float = setting(0.02, at_least=0)
    """How much each running decode slows a prefill down (0.02: by 2%)."""


@dataclass(frozen=True, kw_only=True)
class PrefetchConfig:
    """Prefetching KV to CPU RAM from disk, the remote store or another replica, before a request
    is forwarded."""

    enabled: bool = True
    """If false, the router prefetches and copies nothing."""
    wait_cap_s: float = setting(2.0, at_least=0)
    """Longest time that a request waits for its prefetch or copy."""
    pin_s: float = setting(10.0, above=0)
    """Longest time that prefetched or copied KV is kept in CPU RAM for its request."""


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Holding requests in the router until a replica can start them soon.

    Only the policy ``ttft`` holds requests. The other policies predict nothing and send at once.
    """

    enabled: bool = True
    """If false, every request is sent at once."""
    max_waiting: int = setting(4096, at_least=0)
    """Requests held at once. Further requests get 429."""
    max_wait_s: float = setting(60.0, above=0)
    """Longest time that a request is held; then it gets 429. If no replica is predicted to
    begin with it within that time, it gets 429 at once. A client may ask for less."""
    no_replica_wait_s: float = setting(0.0, at_least=0)
    """Longest time that a request is held while no replica of its model is up; then it gets 503.
    0: it gets 503 at once, so that clients and load balancers turn elsewhere. Set it to the start
    time of a replica if an autoscaler starts replicas from zero. All policies hold requests
    then."""
    keep_alive_s: float | None = setting(10.0, above=0)
    """A client that streams gets an SSE comment each time that its request was held for this long,
    so that load balancers do not end the connection. With the first one it gets status 200: a later
    error is an event. ``null``: none. Behind Envoy there are none."""
    dispatch_ahead_s: float = setting(4.0, at_least=0)
    """Predicted work, in seconds, that may be queued at a replica before a request is sent to it.
    Lower values let short requests overtake; higher values keep replicas from going idle."""
    ageing: float = setting(0.5, above=0)
    """The queue is ordered by predicted work, shortest first. Each second of waiting counts like
    this many seconds less work. Lower favours short requests; higher favours early ones."""
    keyless_priority: PriorityName = "normal"
    """Best class of requests without a client key, and so of all behind a gateway: as ``priority``
    of a key."""
    replica_priorities: bool = False
    """Set it if all replicas run with ``--scheduling-policy priority``. They then get a number for
    each request's class: below 0 for ``high``, 0 for ``normal``, above 0 for ``batch``. Otherwise
    they get 0, because a replica with another policy may refuse other numbers."""


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """What ``GET /scaling`` and the metrics for autoscalers count with."""

    decode_slots: int | None = setting(None, at_least=1)
    """Answers that a replica writes at once: vLLM's ``--max-num-seqs``, which vLLM does not report.
    Without it, answers at once are no limit."""


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Keeping a session on the replica that has its KV."""

    header: str = "x-session-id"
    """Request header that names a session. Without it, the body's ``prompt_cache_key``,
    ``session_id`` or ``user`` names the session."""
    max_sessions: int = setting(100_000, at_least=1)
    """Sessions remembered. Beyond that the least recently used ones are forgotten, of the key that
    has most."""
    ttl_s: float = setting(3600.0, above=0)
    """How long a session is remembered after the end of its last answer."""


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """How much the router remembers of the KV that replicas hold."""

    max_keys: int | None = setting(None, at_least=1)
    """Block keys remembered, for all replicas together; each takes about 150 bytes. By default
    50,000 per replica and at least 4,000,000. Beyond that the ends of the prompts that were not
    used for longest are dropped. The same limit holds for the keys of LMCache servers."""
    speculative_ttl_s: float = setting(30.0, above=0)
    """How long after an answer's end its prompt counts as held, unless events confirm it."""
    history_ttl_s: float = setting(600.0, above=0)
    """The same for replicas that publish no events, and for answered prompts that no event
    confirmed."""


@dataclass(frozen=True, kw_only=True)
class ModelTokenizerConfig:
    """The tokenizer of one model."""

    path: str
    """Directory of the tokenizer."""
    chat_template: str | None = None
    """A template file, if its replicas run with ``--chat-template``."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How the router turns prompts into the tokens that replicas see.

    By default the router looks for each model's tokenizer on its own disk: in the directory that
    replicas name, and in the Hugging Face cache. It gets what is not there from the replicas'
    agents, with the chat template that they use. It downloads nothing else.
    """

    path: str | None = None
    """Directory of the tokenizer of all models that ``models`` does not name."""
    models: dict[str, ModelTokenizerConfig] = setting(default_factory=dict)
    """Tokenizers of single models, by the names that requests use: ``NAME: {path: DIRECTORY}``, and
    ``chat_template`` if their replicas run with ``--chat-template``."""
    cache_directory: str | None = None
    """Where the router keeps tokenizers that agents have sent. By default ``warmroute/tokenizers``
    in ``$XDG_CACHE_HOME`` or ``~/.cache``; if that cannot be written, in the directory for
    temporary files."""
    cache_bytes: int = setting(1024 * MIB, at_least=128 * MIB)
    """Limit of that directory. The tokenizers that were not used for the longest time go first."""
    memo_bytes: int = setting(64 * MIB, at_least=0)
    """Memory for tokenized texts, so that the next turn of a conversation only tokenizes its new
    text."""
    ask_replicas: bool = True
    """Ask a replica for the tokens (``POST /tokenize``) of each prompt that the router cannot
    tokenize exactly, because the tokenizer is missing or another, or because vLLM renders the chats
    in its own code. Not asked about are prompts of less than 8,192 characters, and those with
    images, audio or video. Without an answer within 0.1 to 1 s, by the prompt's length, the prompt
    is matched by its text."""
    chat_template: str | None = None
    """A template file, for replicas that run with ``--chat-template``."""


# --- time limits and failures


@dataclass(frozen=True, kw_only=True)
class TimeoutsConfig:
    """Time limits."""

    connect_s: float = setting(5.0, above=0)
    """For connecting to a replica."""
    first_byte_s: float | None = setting(None, above=0)
    """From sending a request to the first byte of the answer. Unlimited by default, because a long
    prompt on a busy replica can take minutes. Without it, a request waits until its replica has
    computed nothing for 30 s although a request there takes 10 times as long as predicted (at least
    60 s)."""
    stream_idle_s: float | None = setting(300.0, above=0)
    """How long an answer that has begun may make no progress, because the replica sends nothing or
    the client reads nothing. Then it is ended. ``null``: no limit."""
    health_interval_s: float = setting(2.0, above=0)
    """Time between two health probes of a replica."""
    health_timeout_s: float = setting(2.0, above=0)
    """Time limit of one health probe."""
    body_s: float = setting(60.0, above=0)
    """How long a client may take to send a request's body; then it gets 408."""
    idle_s: float = setting(75.0, above=0)
    """The router closes a client's connection that has no request, or is still sending a request's
    headers, after this time. Set it longer than the idle timeout of your load balancer (often
    60 s): otherwise the load balancer may use a connection that is being closed."""
    leave_s: float | None = setting(None, at_least=0)
    """How long the router still accepts requests after SIGTERM, while ``/health`` answers 503 and
    each answer closes its connection. Set it to the time that load balancers need to notice. By
    default 5 s if other machines can reach the router, else 0. After SIGINT (Ctrl-C) it is 0."""
    drain_s: float = setting(30.0, at_least=0)
    """How long running requests may then take to finish."""


@dataclass(frozen=True, kw_only=True)
class BreakerConfig:
    """Circuit breaker: avoids a replica whose requests fail while its health probes pass.

    Failures are: no first byte in time, a broken connection, and the statuses 500, 502, 503 and
    504. While the breaker is open, requests go to other replicas that can answer.
    """

    enabled: bool = True
    """If false, it never opens."""
    failures_in_a_row: int = setting(5, at_least=1)
    """It opens after this many consecutive failures."""
    failure_share: float = setting(0.5, above=0, at_most=1)
    """It also opens when this share of the requests within ``window_s`` has failed, with at least
    ten requests."""
    window_s: float = setting(10.0, above=0)
    """Period over which the share is measured."""
    open_s: float = setting(5.0, above=0)
    """How long it stays open. Then it lets one request at a time through: a success closes it, and
    each failure opens it for twice as long."""
    max_open_s: float = setting(60.0, above=0)
    """Longest time that it stays open before it lets a request through."""


# --- clients


@dataclass(frozen=True, kw_only=True)
class KeyConfig:
    """One client's key. ``warmroute key NAME`` makes a key and this entry."""

    name: str
    """Name in the log and in metrics."""
    sha256: str
    """SHA-256 of the key, in hex digits. The key itself is not stored."""
    second_sha256: str | None = None
    """SHA-256 of a second key that is valid too, while clients change from one to the other. Both
    share all limits."""
    valid_until: str | None = setting(None, parse=parse_date)
    """Last day (UTC) on which the key is valid, such as 2027-12-31. After it clients get 401."""
    models: tuple[str, ...] | None = None
    """Models that the key may use. By default all."""
    requests_per_minute: int | None = setting(None, at_least=1)
    """Rate limit, as a token bucket that holds one minute's worth. Beyond it clients get 429. By
    default unlimited."""
    tokens_per_minute: int | None = setting(None, at_least=1)
    """The same for tokens, of prompts and answers together."""
    tokens_per_day: int | None = setting(None, at_least=1)
    """Budget of tokens for each day from 00:00 UTC, of prompts and answers together. Beyond it
    clients get 429 until the next day. A restart of the router forgets what was used."""
    max_parallel_requests: int | None = setting(None, at_least=1)
    """Requests under way at once. Further ones get 429."""
    priority: PriorityName = "normal"
    """Best class of the key's requests, and the class of those that ask for none. If requests have
    to wait in the router, ``high`` goes before ``normal``, and ``batch`` last."""


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Which clients may use the router. Without ``keys`` and ``keys_file`` every client may."""

    keys: tuple[KeyConfig, ...] = ()
    keys_file: str | None = None
    """A YAML file with more ``keys:``."""
    admin_sha256: tuple[str, ...] = ()
    """SHA-256 of each admin key (``warmroute key --admin``). An admin key is required for
    ``/explain``, ``/metrics``, ``/replicas``, the ``/usage`` of all keys, the data of ``/ui``, the
    controller's API and the details of ``/health``. The router's user may also send the token in
    the file that the log names; commands on the same machine do so."""
    metrics: Literal["admin", "open"] = "admin"
    """``open``: ``/metrics`` needs no key."""
    cache: Literal["shared", "per-key"] = "shared"
    """``per-key``: clients with different keys share no cached KV, not even of equal system
    prompts. The router sets the ``cache_salt`` of each prompt, made from the key's SHA-256 and the
    client's own salt, if it sends one. For vLLM; not for paths of ``passthrough``, nor for forms
    (audio, images). KV in LMCache 0.5 is not matched then."""
    routers: int = setting(1, at_least=1)
    """Over how many routers a load balancer spreads the clients. Each router counts for itself, and
    enforces this part of the limits of each key: with 3, a third."""


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """The certificate that the router shows to clients."""

    cert_file: str
    """PEM file with the certificate and its chain."""
    key_file: str | None = None
    """PEM file with the private key, without a password. By default the key is in
    ``cert_file``."""


@dataclass(frozen=True, kw_only=True)
class ReplicaTlsConfig:
    """How the router verifies the certificates of ``https://`` replicas and agents."""

    ca_file: str | None = None
    """PEM file of trusted authorities. By default the system's."""
    verify: bool = True
    """If false, any certificate is accepted: a machine in between can read all traffic."""


@dataclass(frozen=True, kw_only=True)
class CorsConfig:
    """Web pages of other origins that may call the router. Without the section: none."""

    allow_origins: tuple[str, ...]
    """Origins such as ``https://chat.example.com``; ``*`` allows any."""


# --- what is recorded of requests


@dataclass(frozen=True, kw_only=True)
class RequestLogConfig:
    """One line for each finished request. It contains no text of prompts or answers.

    If requests finish faster than lines can be written, lines are dropped and counted in
    ``warmroute_records_dropped_total``.
    """

    format: Literal["text", "json"] = "text"
    """``json``: one object a line, with all fields."""
    path: str | None = None
    """File to append to, or ``-`` for standard output. A file that was moved away is created
    again. By default text goes to the router's log, subject to ``log_level``, and JSON to
    standard output."""
    prompt_hashes: bool = False
    """Add hashes of each prompt's beginnings to the JSON, for ``warmroute replay``: about 8 bytes
    for each 128 tokens (1,024 after the first 16,384). Nobody can read a text from them, but who
    has a text can find out whether it was sent."""


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """OpenTelemetry traces of requests. Needs the extra ``otel``.

    Without the section the router forwards a client's ``traceparent`` unchanged.
    """

    endpoint: str = "http://127.0.0.1:4318"
    """A collector that accepts OTLP over HTTP. ``/v1/traces`` is added to a URL without a path.
    ``OTEL_EXPORTER_OTLP_HEADERS`` and the exporter's other variables apply too."""
    service_name: str = "warmroute"
    """Service name in the traces."""
    sample_ratio: float = setting(1.0, at_least=0, at_most=1)
    """Share of requests without a ``traceparent`` that are traced. For the others, the
    ``traceparent`` decides."""


# --- further ports


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """LMCache's controller: an API to look up, move, pin and clear KV.

    Any program that reaches its ports can drop every replica's KV. Without a ``secret`` or an
    admin key the API listens on the loopback interface only.
    """

    host: str = "127.0.0.1"
    """Address that the API and the monitor listen on. Replicas on other machines must reach it."""
    port: int = setting(9000, at_least=0, at_most=65535)
    """Port of the API. 0 picks a free port, which the log shows."""
    monitor_port: int = setting(9001, at_least=0, at_most=65535)
    """Port where replicas register: their ``controller_url``."""
    secret: str | None = field(default=None, repr=False)
    """Required of every caller of the API, as the password in its URL or as a bearer token. An
    admin key is accepted too."""
    secret_file: str | None = None
    """A file with the ``secret``."""


@dataclass(frozen=True, kw_only=True)
class LmcacheWorkersConfig:
    """LMCache inside vLLM (``LMCacheConnectorV1``). Its workers register here over ZeroMQ.

    A replica's ``instance_id`` must equal its ``lmcache_instance_id``.
    """

    unauthenticated_host: str = "127.0.0.1"
    """Address that the three ports listen on. LMCache's protocol has no authentication: a program
    that reaches these ports can send the router false information about KV, and can make it
    connect to any address. Use the loopback interface or a private network only."""
    pull_port: int = setting(8300, at_least=0, at_most=65535)
    """The workers' ``controller_pull_url``. 0 picks a free port, which the log shows."""
    reply_port: int = setting(8400, at_least=0, at_most=65535)
    """The workers' ``controller_reply_url``. 0 picks a free port."""
    heartbeat_port: int = setting(8600, at_least=0, at_most=65535)
    """Port for heartbeats, sent to workers when they register. 0 picks a free port."""
    timeout_s: float = setting(30.0, above=0)
    """A worker is forgotten after this time without a heartbeat. Set it to at least three times
    the workers' ``lmcache_worker_heartbeat_time``."""
    chunk_size: int = setting(256, at_least=1)
    """The workers' ``chunk_size``."""
    pre_caching_hash_algorithm: PreCachingHash = "builtin"
    """The workers' ``pre_caching_hash_algorithm``. All except the SHA-256 ones also need the
    replica's ``hash_seed``."""


@dataclass(frozen=True, kw_only=True)
class PickerConfig:
    """The endpoint picker for a gateway (``warmroute picker``)."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "envoy_port": "delete it: Envoy asks at picker.port; generate its configuration again "
        "(warmroute picker --print-envoy)",
    }

    host: str = "127.0.0.1"
    """Address that both ports listen on. Without ``client_ca`` the gRPC port does not authenticate
    its callers."""
    port: int = setting(9002, at_least=0, at_most=65535)
    """Port for the gateway's gRPC calls. 0 picks a free port, which the log shows."""
    http_port: int = setting(9003, at_least=0, at_most=65535)
    """Port of its own ``/health``, ``/metrics`` and ``/explain``."""
    certificate: str | None = None
    """PEM file of the certificate for gateways that use TLS. Needs ``key`` too."""
    key: str | None = None
    """PEM file of the certificate's private key."""
    client_ca: str | None = None
    """PEM file of authorities. Only gateways with a certificate of one of them are answered. Needs
    ``certificate`` too. Required if a replica has an ``api_key`` and ``host`` is not loopback."""
    prefiller_header: bool = False
    """Set it if requests reach replicas through llm-d's routing sidecar: then replicas with a
    ``nixl_role`` prefill for each other. The picker names the one that prefills in
    ``x-prefiller-host-port``."""
    waive: tuple[Waivable, ...] = ()
    """Settings of this file that need not hold behind the gateway, or that the gateway enforces
    itself. Without it ``warmroute picker`` refuses to start with any of them: client keys
    (``access``), ``tls``, ``model_aliases`` and ``cors``."""


# --- the whole file


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """All settings of ``router.yaml``."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "lmcache_coordinator": "Warmroute does not ask another coordinator: delete this line, add "
        "'controller: {}', and start each LMCache server with --coordinator-url http://host:9000 "
        "--coordinator-event-reporting",
    }

    host: str = "127.0.0.1"
    """Address to listen on. Use ``0.0.0.0`` for clients on other machines."""
    port: int = setting(8080, at_least=0, at_most=65535)
    """Port to listen on. 0 picks a free port, which the log shows."""
    replicas: tuple[ReplicaConfig, ...] = setting((), live=True)
    """The replicas. At least one, unless ``discovery`` finds them."""
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    policy: PolicyName = "ttft"
    """How a replica is picked. ``ttft``: the one that is predicted to answer first. The other
    policies exist for comparison."""
    first_token_weight: float = setting(DEFAULT_WEIGHTS.first_token_weight, above=0)
    """How many seconds after the first token count as one second before it. 1: the whole answer
    counts, whichever part of it is late. A large number: only the time to first token counts."""
    max_body_bytes: int = setting(64 * MIB, at_least=1024)
    """Largest body of one request. Larger ones get 413."""
    max_bodies_bytes: int = setting(2048 * MIB, at_least=1024)
    """Memory for the bodies of all requests that are being read or wait for the beginning of their
    answer, and for the values parsed of them until their prompts are read. When it is full,
    further requests get 503."""
    retries: int = setting(2, at_least=0, at_most=100)
    """How many other replicas a request may try before its answer has begun. If no other replica
    can take it, a replica that answered with ``Retry-After`` of at most 5 s is tried again. Behind
    Envoy: one other at most."""
    model_aliases: dict[str, str] = setting(default_factory=dict, live=True)
    """Additional model names for clients, each with the name that replicas use."""
    passthrough: tuple[str, ...] = setting((), live=True)
    """Paths that are forwarded to replicas in addition to vLLM's APIs. ``/x/*``: all paths below
    ``/x/``."""
    cors: CorsConfig | None = None
    log_level: LogLevel = setting("info", live=True)
    """Lowest level that is logged. No level logs text of prompts or answers."""
    log_format: Literal["text", "json"] = "text"
    """Of the router's log on standard error. ``text``: local time without its zone. ``json``: one
    object a line, with the time in UTC."""
    request_log: RequestLogConfig = field(default_factory=RequestLogConfig)
    uncached_causes: bool = True
    """Whether the router finds out why tokens of a prompt were not cached: in the request log,
    headers and metrics, and for ``warmroute waste``. It takes up to about 60 MB."""
    tracing: TracingConfig | None = None
    """Off without the section. An empty section (``tracing: {}``) enables it."""
    rates: RatesConfig = field(default_factory=RatesConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    sessions: SessionConfig = field(default_factory=SessionConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    access: AccessConfig = setting(default_factory=AccessConfig, live=True)
    fleet_secret_file: str | None = None
    """File with the secret that the router and the replicas' agents share (``fleet_secret_file``
    at the replicas too). The variable WARMROUTE_FLEET_SECRET can hold the secret instead."""
    tls: TlsConfig | None = setting(None, live=True)
    """Off without the section: the router then speaks plain HTTP. Other files are used without a
    restart; turning TLS on or off needs one."""
    replica_tls: ReplicaTlsConfig = setting(default_factory=ReplicaTlsConfig, live=True)
    """New authorities are trusted without a restart; removed ones stay trusted until the
    restart."""
    shares_replicas: bool = False
    """Set it if other routers or pickers send requests to these replicas too. Then rendezvous
    hashing picks the replica of a session that this router does not know, and replicas are asked
    for their load."""
    picker: PickerConfig | None = None
    """Used by ``warmroute picker``. Without the section it has the defaults."""
    controller: ControllerConfig | None = None
    """Off without the section. An empty section (``controller: {}``) enables it."""
    lmcache_workers: LmcacheWorkersConfig | None = None
    """Off without the section. An empty section enables it."""
