"""The judgment behind a gateway: an endpoint picker of the Gateway API Inference Extension.

The gateway (Envoy, or what is built on it) carries all bytes. For each request it calls the
picker by gRPC, with Envoy's external processing protocol, and tells of headers, body and answer:

    server.Picker               the ports, TLS, gRPC's health checks
    service.Processor           one call: what the gateway tells in, what it should do out
    stream.Stream               its messages, and that it may end at any time
    words                       what messages say
    exchange.Exchange           one request: asked, picked, answered, ended

An Envoy with our own configuration asks by HTTP instead, which costs a third, and its access log
tells of the answers:

    asks.Asks                   one question: headers and body in, where it goes out
    answers.AnswersLog          the log: how requests stand, and how they ended

Both ask the same:

    proxy.judge                 reads, admits, stages, learns: the proxy asks it too
    endpoints.Endpoints         which ip:port is which replica

Needs the extra ``gateway``. Called by `router.serve`. Imports config, envoy, http, residency,
fleet, record, proxy and tasks.
"""

from router.picker.server import CannotListenError, Picker

__all__ = [
    "CannotListenError",
    "Picker",
]
