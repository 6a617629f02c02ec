"""What vLLM loads; the only package that imports vLLM."""


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
