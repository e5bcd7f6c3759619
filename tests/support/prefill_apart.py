"""Engines of `LLM` whose prompts another engine computes, beside it in this process, as a decode server's do."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import zmq

from mini_infer_engine.config.options.settings import EngineSettings, transfer_fault
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_transfer import KVTransferStats
from mini_infer_engine.core.request import KVSource, Output, Request
from mini_infer_engine.core_process.build import BuiltEngine, build_engine
from mini_infer_engine.core_process.kv_transfer import begin_identity, start_transfer
from mini_infer_engine.kv_transfer.transfer_port import TransferPort
from mini_infer_engine.offline import loaded_model
from mini_infer_operator.local.ports import free_ports

COMPUTED_HERE = {"prompt_logprobs", "embedding", "beam_search"}
"""Why a prompt is not even asked for elsewhere."""


@contextmanager
def prefill_apart() -> Iterator[None]:
    """`LLM(...)` within has such an engine. ValueError: its settings and KV transfer cannot be combined."""
    with ExitStack() as stack:

        def build(settings: EngineSettings, *_: Any, **options: Any) -> BuiltEngine:
            if fault := transfer_fault(settings):
                raise ValueError(fault)
            weights, ports = begin_identity(settings, None), free_ports(2)
            context = zmq.Context()
            stack.callback(context.destroy, linger=0)
            for role, port in zip(("prefill", "decode"), ports, strict=True):
                built = build_engine(settings, moves_kv=True, **options)
                assert isinstance(built, BuiltEngine)
                where = TransferPort(port=port, role=role)
                revision, memory, opens = built.model_revision, built.memory, built.open_transport
                worker = start_transfer(context, settings, where, built.engine, revision, memory, opens, weights)
                stack.callback(worker.stop)
                if role == "prefill":
                    stack.enter_context(_runs(built.engine))
            source = KVSource(how="prefill", address=f"tcp://127.0.0.1:{ports[0]}")
            stack.enter_context(_receives_from(built.engine, source))
            return built

        def build_several(settings: EngineSettings, *_: Any) -> None:
            raise ValueError(transfer_fault(settings))

        with (
            patch.object(loaded_model, "build_engine", build),
            patch.object(loaded_model, "OfflineEngines", build_several),
        ):
            yield


@contextmanager
def _runs(engine: Engine) -> Iterator[None]:
    """In a thread of its own."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            if not engine.has_work or engine.only_receives:
                is_over.wait(0.001)
            engine.step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _receives_from(engine: Engine, source: KVSource) -> Iterator[None]:
    """Its prompts; in the end they have come from there, unless that cannot be."""
    add, step = engine.add, engine.step

    def add_from(request: Request) -> None:
        add(msgspec.structs.replace(request, kv_source=source))

    def step_gently() -> list[Output]:
        if engine.only_receives:
            time.sleep(0.001)  # or the other threads would have to wait for this one
        return step()

    with patch.object(engine, "add", add_from), patch.object(engine, "step", step_gently):
        yield
    end_s = time.monotonic() + 5
    while not _has_come(seen := engine.stats().kv_transfer):  # the transfer thread tells of it by and by
        assert time.monotonic() < end_s, f"no prompt came from the prefill engine: {seen}"
        time.sleep(0.01)


def _has_come(seen: KVTransferStats) -> bool:
    return bool(seen.received or set(seen.fallbacks) & COMPUTED_HERE)
