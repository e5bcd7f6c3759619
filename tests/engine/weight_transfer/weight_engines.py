"""Engines of tiny models on CPUs that serve their weights, or load those of others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.cpu.executor import TorchExecutor
from mini_infer_engine.runtime.model_runner import ModelRunner, make_runner
from mini_infer_engine.weight_transfer.exchange import WeightExchange
from mini_infer_operator.local.ports import free_port_range
from tests.support.tiny_models import chunk

HOST = "127.0.0.1"
SECRET = PeerSecret(bytes(range(32)))


def free_port(count: int = 2) -> int:
    """The first of so many ports in a row on which nothing listens now."""
    return free_port_range(count)


def exchange(port: int = 0, *peers: int, secret: PeerSecret | None = SECRET) -> WeightExchange:
    """An exchange on loopback; `peers` are the ports of others."""
    key = "" if secret is None else secret.hex()
    return WeightExchange(host=HOST, port=port, peers=tuple(f"{HOST}:{peer}" for peer in peers), key=key)


def load(directory: Path, weights: WeightExchange, **settings: Any) -> ModelRunner:
    """A runner of the model in a folder."""
    defaults: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 16_000_000, "max_num_seqs": 16}
    defaults |= {"weights_from": "peers", "disable_hybrid_kv_cache_manager": True}
    engine_settings = EngineSettings(model=str(directory), **(defaults | settings))
    config = read_config(directory, engine_settings.model_impl, reads_images=True)
    return make_runner(engine_settings, config, directory, TorchExecutor, weights=weights)


@contextmanager
def serving(directory: Path, **settings: Any) -> Iterator[tuple[ModelRunner, int]]:
    """An engine that has loaded files and serves its weights, and its port."""
    port = free_port()
    runner = load(directory, exchange(port), **settings)
    assert runner.weight_server is not None
    try:
        yield runner, port
    finally:
        runner.weight_server.close()


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Logits of a short prompt, [tokens, vocab]."""
    tokens = [5, 17, 3, 44, 90, 6, 7]
    table = list(range(1, 1 + -(-len(tokens) // runner.page_size)))
    return runner.logits(Batch([chunk(0, tokens, 0, len(tokens), table)], 1))
