"""A simulated replica's ``/metrics``, under vLLM's names."""

from simulator.replica import Replica


def render(replica: Replica) -> str:
    """Return Prometheus' text format."""
    model, totals = replica.model, replica.model.totals
    below = totals.cached.cpu + totals.cached.disk
    waiting = len(model.waiting) + len(model.loading)
    usage = model.cache.held_blocks / model.cache.num_blocks
    families: list[tuple[str, str, float]] = [
        ("num_requests_running", "gauge", len(model.running)),
        ("num_requests_waiting", "gauge", waiting),
        ("kv_cache_usage_perc", "gauge", usage),
        ("prefix_cache_queries_total", "counter", totals.queries),
        ("prefix_cache_hits_total", "counter", totals.cached.gpu),
        ("external_prefix_cache_queries_total", "counter", totals.queries - totals.cached.gpu),
        ("external_prefix_cache_hits_total", "counter", below),
        ("prompt_tokens_total", "counter", totals.queries),
        ("generation_tokens_total", "counter", totals.generated),
        ("num_preemptions_total", "counter", totals.preempted),
        ("request_success_total", "counter", totals.finished),
    ]
    shape = model.shape
    cache = (
        f'vllm:cache_config_info{{block_size="{shape.block_tokens}",engine="0",'
        f'num_gpu_blocks="{shape.gpu_blocks}"}} 1.0\n'
    )
    labels = f'{{engine="0",model_name="{replica.settings.model}"}}'
    return cache + "".join(
        f"# TYPE vllm:{name} {kind}\nvllm:{name}{labels} {float(value)}\n"
        for name, kind, value in families
    )
