"""Assembles the KV transfer of one engine: identity, transport, port, thread, connector."""

import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread

import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request
from mini_infer_engine.core_process.weights_identity import weights_identity
from mini_infer_engine.dry.dry_run import DryRun
from mini_infer_engine.kv_transfer.connector import ANY_VOCABULARY, TransferConnector, any_request
from mini_infer_engine.kv_transfer.consumer_jobs import KVConsumerLimits
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.transfer_port import TransferPort
from mini_infer_engine.kv_transfer.transport import OpenTransport, TransportChoice
from mini_infer_engine.kv_transfer.worker import Identity, TransferWorker
from mini_infer_process import zmq_limits
from mini_infer_process.curve import secure_server
from mini_infer_process.listening import tcp_address

log = logging.getLogger(__name__)

_ANY_HOST = ("0.0.0.0", "::", "*")


def begin_identity(settings: EngineSettings, dry_run: DryRun | None) -> "Future[str]":
    """Begins to compute the identity of the engine's keys and values, while its weights are loaded."""
    future: Future[str] = Future()

    def compute() -> None:
        try:
            future.set_result(weights_identity(settings, dry_run))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=compute, name="checkpoint-digest", daemon=True).start()
    return future


def start_transfer(
    context: zmq.Context[zmq.Socket[bytes]],
    settings: EngineSettings,
    where: TransferPort,
    engine: Engine,
    model_revision: str,
    memory: KVMemory,
    open_transport: OpenTransport,
    weights: "Future[str]",
    *,
    check: Callable[[Request], None] = any_request,
    vocab_size: int = ANY_VOCABULARY,
    secret: PeerSecret | None = None,
) -> TransferWorker:
    """Opens the transfer port, and lets the engine exchange keys and values from now on. `memory` is this rank's page
    pool.

    `check` raises ValueError if another engine requests what no client may request. Raises ValueError if the port is
    taken, or the chosen transport is not available.
    """
    engine_id = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
    router = _bind(context, where, secret)
    choice = TransportChoice(settings.kv_transport, settings.kv_staging_memory, settings.kv_transfer_bandwidth)
    transport = open_transport(choice, engine_id)
    identity = Identity(engine_id=engine_id, weights=weights.result(), memory=memory)
    limits = KVConsumerLimits(lease_s=settings.kv_transfer_lease, timeout_s=settings.kv_transfer_timeout)
    worker = TransferWorker(identity, transport, router, where.role, limits, secret)
    scheduler = engine.scheduler
    engine.kv_connector = TransferConnector(
        worker,
        scheduler,
        model_revision,
        (_advertised(where.host), where.port),
        lease_s=settings.kv_transfer_lease,
        falls_back=settings.kv_transfer_fallback,
        queued_tokens=partial(getattr, scheduler, "num_queued_tokens"),
        retained_share=settings.kv_transfer_retained_share,
        check=check,
        vocab_size=vocab_size,
    )
    worker.start()
    log.info("KV transfer: role %s, transport %s, control at port %d", where.role, transport.name, where.port)
    return worker


def _bind(context: zmq.Context[zmq.Socket[bytes]], where: TransferPort, secret: PeerSecret | None) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.set(zmq.LINGER, 0)
    zmq_limits.TRANSFER.apply(router)
    secure_server(router, secret)
    router.set(zmq.IPV6, ":" in where.host)
    address = tcp_address(where.host, where.port)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close(linger=0)
        raise ValueError(f"cannot listen on {address} ({error}): choose another --transfer-port") from None
    return router


def _advertised(host: str) -> str:
    """Returns the address by which other machines reach this one: the pod's address if it has one."""
    if host not in _ANY_HOST:
        return host
    return os.environ.get("POD_IP") or socket.gethostname()
