"""The router: sends every prompt to the replica that already remembers it.

One request: `access` lets it in, `app` gives it to `proxy`, which has its body read by `http` and
its prompt by `prompt` (tokens or text), and asks `scheduling` where and when it goes. That
reads the state of the `fleet` and what `index` knows of its prefix. `staging` has KV promoted or
copied, `proxy.upstream` forwards, `proxy.relay` passes the answer on, `record` tells of it.

Behind a gateway `picker` stands in for `proxy`: it says where a request goes, and `envoy` has the
configuration of an Envoy that asks it and carries the bytes.

What a person sees of it: `ui` shows a page of the fleet, the last requests' records and their sums,
and `terminal` the same in a terminal.

One KV event: `feeds` follows the stream of a replica's agent or of vLLM itself;
`residency.kv_events` reads it, and `fleet` puts the keys into the `residency.PrefixIndex`.

Stock LMCache servers report to `lmcache` as their coordinator; it indexes what they hold, and has
them prefetch for `staging`. LMCache inside vLLM, and our engine's agents, report to it as their
controller.

One restart: `cli` reads the `config`, `serve` opens the ports, `app` puts the rooms together;
`feeds` fetches a snapshot of each replica, and its health says when it takes requests.
`membership` reads the configuration again when it has changed, and has replicas join and leave.

`doctor` examines a configuration and its live fleet by these parts, for a person.

Directions: launch, doctor and the files here -> feeds, picker -> proxy -> scheduling, staging,
prompt -> fleet -> index -> config; lmcache -> staging, access, http;
membership -> fleet; proxy -> access -> http -> config; ui -> record,
fleet, http; `tasks` and `terminal` import no other room.
"""
