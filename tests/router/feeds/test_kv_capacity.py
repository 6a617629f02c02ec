"""How much KV a replica holds, from what vLLM's /metrics say."""

import pytest

from router.feeds.replica_answers import engines, kv_capacity

TOLD = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
"""
ENGINE = 'vllm:cache_config_info{block_size="%s",cache_dtype="auto",engine="%d",%s} 1.0\n'


@pytest.mark.parametrize(
    ("engines", "tokens"),
    [
        ([ENGINE % ("128", 0, 'num_gpu_blocks="36",num_gpu_blocks_override="36"')], 4608),
        ([ENGINE % ("16", at, 'num_gpu_blocks="100"') for at in range(2)], 3200),
        ([ENGINE % ("16", 0, 'num_gpu_blocks="None"')], None),
        ([ENGINE % ("None", 0, 'num_gpu_blocks="7"')], None),
        ([ENGINE % ("16", 0, 'is_attention_free="False"')], None),
        ([], None),
    ],
)
def test_the_capacity_is_that_of_all_engines(engines: list[str], tokens: int | None) -> None:
    assert kv_capacity(TOLD + "".join(engines)) == tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engines_are_counted(ranks: int) -> None:
    page = TOLD + "".join(ENGINE % ("16", at, 'num_gpu_blocks="1"') for at in range(ranks))
    assert engines(page) == ranks


def test_a_server_without_the_gauge_has_one_engine() -> None:
    assert engines("") == engines(TOLD) == 1


def test_what_is_no_metrics_page_tells_nothing() -> None:
    assert kv_capacity("<html>vllm:cache_config_info</html>") is None
