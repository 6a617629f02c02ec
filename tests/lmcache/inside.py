"""LMCache as vLLM holds it inside, without a vLLM: run by the Python of LMCache's environment.

All of it is stock (engine, backends, worker, sender of messages), but for what copies from a GPU:
there LMCache's own ``MockGPUConnector`` stands. The configuration is in ``LMCACHE_CONFIG_FILE``.
Lines on stdin are commands, ``["store", tokens]``, ``["hits", tokens]`` and ``["close"]``, each
answered by a line of JSON on the descriptor that is the first argument.
"""

import json
import os
import sys

import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

KV_SHAPE = (2, 2, 256, 2, 8)
"""Layers, key and value, tokens of a chunk, heads, their size."""


def make_engine(worker_id: int, world_size: int) -> LMCacheEngine:
    config = LMCacheEngineConfig.from_file(os.environ["LMCACHE_CONFIG_FILE"])
    config.validate()
    shape = (*KV_SHAPE[:2], config.chunk_size, *KV_SHAPE[3:])
    metadata = LMCacheMetadata(
        model_name="m",
        world_size=world_size,
        local_world_size=world_size,
        worker_id=worker_id,
        local_worker_id=worker_id,
        kv_dtype=torch.bfloat16,
        kv_shape=shape,
        chunk_size=config.chunk_size,
        role="worker",
    )
    engine = LMCacheEngineBuilder.get_or_create(
        config.lmcache_instance_id,
        config,
        metadata,
        MockGPUConnector(shape),
        lambda tensor, rank: None,
        lambda value, rank: value,
    )
    engine.post_init()
    return engine


def main(answers_to: int, worker_id: int, world_size: int) -> None:
    engine = make_engine(worker_id, world_size)
    answers = os.fdopen(answers_to, "w", buffering=1)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        name, *rest = json.loads(line)
        if name == "close":
            engine.close()
            answer = None
        elif name == "store":
            answer = engine.store(torch.tensor(rest[0]))
        else:
            answer = engine.lookup(rest[0])
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
