"""The face that vLLM sees; the only room that imports vLLM.

`connector` is named to vLLM and tells what vLLM's offloading does not (`served`): the model's
identity, requests' adapters, and weights that change. `spec` makes the rest:
`manager` is the scheduler's view of the engine (`stores`: what it stores), `copying` moves KV
between the GPU and the pool's slots.

Loaded by vLLM. Imports engine, residency, agent, transfer, settings, memory, record, identity,
launch and tiers.
"""


def register() -> None:
    """Make the connector known to vLLM by its name: an entry point of ``vllm.general_plugins``.

    vLLM's API server looks the parts of a MultiConnector up by their names, for its statistics.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    name = "WarmrouteConnector"
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "cacheengine.connector.connector", name)
