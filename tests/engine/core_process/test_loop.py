"""The core process's loop: how it ends, and what its front gets when a request cannot be taken."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.peer_ports import PeerPorts
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core_process import loop, messages
from mini_infer_engine.core_process.core_config import CoreConfig
from mini_infer_engine.dry.dry_run import DryRun
from mini_infer_engine.kv_transfer.transfer_port import TransferPort
from mini_infer_engine.kv_transfer.worker import TransferWorker
from tests.engine.server.dry_server import free_port

TIMEOUT_MS = 60_000


class WeirdError(Exception):
    """No exception that anybody expects."""


class FakeApiServer:
    """A core in a thread of this process, and the socket of its front."""

    def __init__(self, folder: Path) -> None:
        config = CoreConfig(
            settings=EngineSettings(model="dry", kv_transport="shm", kv_cache_memory=1 << 26, max_model_len=512),
            dry_run=DryRun(),
            peers=PeerPorts(),
            events_port=0,
            replay_port=0,
            transfer=TransferPort(port=free_port()),
            address=f"ipc://{folder}/core",
            parent_pid=os.getppid(),
            log_level="info",
            log_format="text",
        )
        self.status: Any = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        (folder / "temporary").mkdir()
        self._thread = threading.Thread(target=self._serve, args=(config, folder / "temporary"))
        self._thread.start()
        self.socket.connect(config.address)
        self.send(messages.Hello())

    def _serve(self, config: CoreConfig, folder: Path) -> None:
        try:
            loop.serve(config, folder)
            self.status = 0
        except SystemExit as end:
            self.status = end.code

    def send(self, message: messages.ApiServerMessage) -> None:
        self.socket.send(messages.encode(message))

    def receive(self, kind: type[Any]) -> Any:
        while self.socket.poll(TIMEOUT_MS):
            message = messages.decode_from_core(self.socket.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def join(self) -> None:
        self._thread.join(TIMEOUT_MS / 1000)
        assert not self._thread.is_alive()
        self._context.destroy(linger=0)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each stop of a transfer thread, whether its socket was open until then."""
    calls: list[bool] = []
    stop = TransferWorker.stop

    def recording(worker: TransferWorker) -> None:
        calls.append(not worker._router.closed)
        stop(worker)
        calls.append(worker.failure is None)

    monkeypatch.setattr(TransferWorker, "stop", recording)
    return calls


def test_transfer_thread_is_stopped_before_its_sockets_close_when_the_loop_raises(
    tmp_path: Path, stopped: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(_: loop.CoreLoop) -> None:
        raise WeirdError

    monkeypatch.setattr(loop.CoreLoop, "run", raising)
    api_server = FakeApiServer(tmp_path)
    assert "WeirdError" in api_server.receive(messages.Failed).reason
    api_server.join()
    assert api_server.status == 1
    assert stopped == [True, True]


def test_core_goes_on_when_taking_a_request_raises(
    tmp_path: Path, stopped: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Engine.add

    def raising(engine: Engine, request: Request) -> None:
        if request.request_id == "bad#1":
            raise WeirdError
        add(engine, request)

    monkeypatch.setattr(Engine, "add", raising)
    api_server = FakeApiServer(tmp_path)
    api_server.receive(messages.Ready)
    for name in ("bad#1", "good#2"):
        prompt = Request(request_id=name, prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=1))
        api_server.send(messages.Add(prompt))
    ended: dict[str, Any] = {}
    while len(ended) < 2:
        outputs = api_server.receive(messages.StepOutputs).outputs
        ended |= {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ended["bad#1"] == "error"
    assert ended["good#2"] in ("length", "stop")
    api_server.send(messages.Stop())
    api_server.join()
    assert api_server.status == 0
    assert stopped == [True, True]
