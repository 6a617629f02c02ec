"""One request from its acceptance to the last byte of its answer.

The way of a chat request, call by call: 20 modules to the relay, 3 at its end. At each `return`
the flow comes up to `proxy.proxy` and goes down into another room: four times. Modules that a
step only asks for a value are not named.

    http.boundary.errors_answered     what is raised below becomes an error of the client's API
    app.proxied                       the route of all endpoints that one replica answers
    proxy.proxy.handle                makes the record, and hands it out at the end
    http.boundary.read_body           the body, within its limit                      return 1
    proxy.request.parse               model, session, the longest wait
    prompt.reader.read                by the model's tokenizer; a long new prompt in a thread
    prompt.drafts.draft               what is known of its tokens, and what is new
    prompt.inputs.read_input          which fields are the prompt, by API
    prompt.templates.render           the chat template: text
    prompt.tokenizer.encoder.cut      into pieces, of which the known ones are looked up  return 2
    admission.async_gate.admit        waits until the request may go
    admission.gate.arrive             may it go, or does it wait in the queue?
    fleet.fleet.place                 which replica, by what is known now (by way of `Judge._place`)
    fleet.placement.decide            the replicas that may answer, as candidates
    residency.prefix_index.depths     how much of the prompt each of them holds
    fleet.assessment.assess           the ways to get the rest there, and their costs
    latency.ttft_model.cost           seconds to fetch, load and compute
    fleet.policy.pick                 the candidate with the least score
    fleet.fleet.start                 in flight: its ticket                           return 3
    staging.stager.prepare            prefetch or copy, while that gains              return 4
    proxy.upstream.send               the request goes out; the answer's first byte
    proxy.relay.relay                 the answer, as it comes
    fleet.in_flight.finish            the ticket is given back; the replica's rates learn
    record.metrics.observe            the figures of the request
    record.outlets.take               its line in the log

Where keys are configured, `access.guard` lets it in before the route, and its `Grant` is asked
once the model and the prompt are known. A try that fails before its first byte is made again
from `admission` on, at the next best replica, when `retries` lets it; `hanging` ends its wait where
that is in vain. `response_owners.Bindings` remember which replica
keeps a response or a file.

What has no prompt goes the same way: `passing.passed` takes the place of `proxy.request.parse`,
and nothing is read, held or staged.

Called by the application, and for `Judge` by picker. Imports config, http, access, prompt,
residency, latency, failures, fleet, admission, staging and record.
"""

from router.proxy.hanging import Waits
from router.proxy.judge import Judge
from router.proxy.passing import METHODS, check_passes, keeps, label, passed
from router.proxy.proxy import Proxy
from router.proxy.request import Asked, json_object, parse
from router.proxy.retries import Retries
from router.proxy.upstream import RETRYABLE, client_session
from router.proxy.usage import UsageReader

__all__ = [
    "METHODS",
    "RETRYABLE",
    "Asked",
    "Judge",
    "Proxy",
    "Retries",
    "UsageReader",
    "Waits",
    "check_passes",
    "client_session",
    "json_object",
    "keeps",
    "label",
    "parse",
    "passed",
]
