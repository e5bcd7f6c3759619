"""A peer that dies, lies, is slow or speaks nonsense costs the time until files are read, and nothing else."""

import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.runtime.model_runner import ModelRunner
from mini_infer_engine.weight_transfer import client, messages, sender
from mini_infer_engine.weight_transfer.messages import Digests, Done, Hello, Offer, Refused, TensorSpec
from mini_infer_engine.weight_transfer.model_tensors import ModelTensors
from mini_infer_engine.weight_transfer.pieces import pieces_of
from mini_infer_process.curve import PeerAuthenticator, secure_client, secure_server
from tests.engine.weight_transfer.weight_engines import HOST, SECRET, exchange, free_port, load, logits_of, serving
from tests.support.tiny_models import save_tiny_model

TICKET = bytes(32)


class Peer:
    """An engine of the service that answers as a test says."""

    def __init__(self, source: ModelRunner) -> None:
        self.tensors = ModelTensors(source.worker.model)
        self.pieces = pieces_of(self.tensors.specs)
        self.specs = self.tensors.specs

    def greeted(self) -> bytes:
        """Its answer to a greeting."""
        return messages.encode(Offer("a peer", TICKET, self.specs))

    def content(self, index: int) -> bytes:
        """The bytes that it sends of a piece."""
        piece = self.pieces[index]
        return self.tensors.flat(piece.tensor)[piece.begin : piece.end].numpy().tobytes()

    def digests(self) -> bytes:
        """Its answer to a request for digests."""
        return messages.encode(
            Digests([hashlib.sha256(self.content(each)).digest() for each in range(len(self.pieces))])
        )

    def serve(self, connection: socket.socket) -> None:
        """Serves a connection of bytes."""
        assert connection.recv(32, socket.MSG_WAITALL) == TICKET
        while index := connection.recv(4, socket.MSG_WAITALL):
            connection.sendall(self.content(int.from_bytes(index, "big")))


class Refusing(Peer):
    def greeted(self) -> bytes:
        return messages.encode(Refused("busy"))


class Nonsensical(Peer):
    def greeted(self) -> bytes:
        return b"\xff" * 100


class Typeless(Peer):
    def greeted(self) -> bytes:
        return msgspec.msgpack.encode({"type": "Offer", "name": 5, "ticket": b"", "tensors": None})


class Unasked(Peer):
    def greeted(self) -> bytes:
        return messages.encode(Digests([]))


class Lacking(Peer):
    def greeted(self) -> bytes:
        return messages.encode(Offer("a peer", TICKET, self.specs[1:]))


class Larger(Peer):
    def greeted(self) -> bytes:
        first = self.specs[0]
        grown = TensorSpec(first.name, first.dtype, (1 << 40,), 1 << 42)
        return messages.encode(Offer("a peer", TICKET, [grown, *self.specs[1:]]))


class Dying(Peer):
    def serve(self, connection: socket.socket) -> None:
        connection.recv(36, socket.MSG_WAITALL)
        connection.sendall(b"\0")  # and no more: the process has ended


class Stalling(Peer):
    def serve(self, connection: socket.socket) -> None:
        while connection.recv(4096):
            pass


class Flipping(Peer):
    """Its bytes differ from its digests, as by a fault of memory or of the network."""

    def serve(self, connection: socket.socket) -> None:
        connection.recv(32, socket.MSG_WAITALL)
        while index := connection.recv(4, socket.MSG_WAITALL):
            content = bytearray(self.content(int.from_bytes(index, "big")))
            content[len(content) // 2] ^= 1
            connection.sendall(content)


class Lying(Peer):
    """Its weights are others, and its digests say so."""

    def content(self, index: int) -> bytes:
        return bytes(self.pieces[index].num_bytes)


class Silent(Peer):
    """It never answers with digests."""

    def digests(self) -> bytes:
        return b""


class Miscounting(Peer):
    def digests(self) -> bytes:
        return messages.encode(Digests([b"x"]))


FAULTS = [
    (Refusing, "busy"),
    (Nonsensical, "cannot be read"),
    (Typeless, "cannot be read"),
    (Unasked, "no offer"),
    (Lacking, "manifest"),
    (Larger, "manifest"),
    (Dying, "connection ended"),
    (Stalling, "no byte"),
    (Flipping, "another digest"),
    (Lying, "not that of the files"),
    (Silent, "no digests"),
    (Miscounting, "digests came"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ModelRunner, int]]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3")
    with serving(folder) as (runner, port):
        yield folder, runner, port


@pytest.mark.parametrize(("kind", "reason"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_files_are_read_when_a_peer_is(
    source: tuple[Path, ModelRunner, int], kind: type[Peer], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, runner, _ = source
    monkeypatch.setattr("mini_infer_engine.weight_transfer.decisions.STALL_S", 0.3)
    monkeypatch.setattr(client, "_REPLY_S", 0.3)
    with _answering(kind(runner)) as port:
        copy = load(folder, exchange(0, port))
    assert copy.loaded.source == "files"
    assert reason in copy.loaded.fallback
    assert torch.equal(logits_of(runner), logits_of(copy))


def test_weights_come_from_the_peer_when_it_is_honest(source: tuple[Path, ModelRunner, int]) -> None:
    """The fake that the table's peers are made of is a good peer by itself."""
    folder, runner, _ = source
    with _answering(Peer(runner)) as port:
        copy = load(folder, exchange(0, port))
    assert copy.loaded.peer == "a peer"


def test_files_are_read_when_no_peer_listens(
    source: tuple[Path, ModelRunner, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "HELLO_S", 0.2)
    copy = load(source[0], exchange(0, free_port()))
    assert "answers within" in copy.loaded.fallback


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["another dtype", "another rounding"]
)
def test_a_peer_refuses_when_its_tensors_are_others(
    source: tuple[Path, ModelRunner, int], change: dict[str, str]
) -> None:
    copy = load(source[0], exchange(0, source[2]), **change)
    assert "other_weights" in copy.loaded.fallback


def test_a_peer_refuses_when_its_files_are_of_another_fine_tune(
    source: tuple[Path, ModelRunner, int], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "qwen3", initializer_range=0.1)
    (tmp_path / "config.json").write_bytes((source[0] / "config.json").read_bytes())
    assert "other_weights" in load(tmp_path, exchange(0, source[2])).loaded.fallback


@pytest.mark.parametrize("secret", [None, PeerSecret(bytes(32))], ids=["no secret", "another secret"])
def test_nothing_is_sent_when_an_engine_is_not_of_the_service(
    source: tuple[Path, ModelRunner, int], secret: PeerSecret | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "HELLO_S", 0.3)
    copy = load(source[0], exchange(0, source[2], secret=secret))
    assert "answers within" in copy.loaded.fallback


def test_a_connection_is_closed_when_it_shows_no_ticket(source: tuple[Path, ModelRunner, int]) -> None:
    with socket.create_connection((HOST, source[2] + 1)) as connection:
        connection.sendall(bytes(32))
        assert connection.recv(1) == b""


def test_a_connection_is_closed_when_a_piece_does_not_exist(source: tuple[Path, ModelRunner, int]) -> None:
    folder, runner, port = source
    with _member(port) as dealer, socket.create_connection((HOST, port + 1)) as connection:
        ticket = _ticket(dealer, runner)
        connection.sendall(ticket + (1 << 31).to_bytes(4, "big"))
        assert connection.recv(1) == b""
        dealer.send(messages.encode(Done(ticket)))
    assert load(folder, exchange(0, port)).loaded.source == "peer"


def test_an_engine_is_refused_when_others_are_sent_weights(
    source: tuple[Path, ModelRunner, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, runner, port = source
    with _member(port) as dealer:
        tickets = [_ticket(dealer, runner) for _ in range(sender.MAX_SESSIONS)]
        assert "busy" in load(folder, exchange(0, port)).loaded.fallback
        for ticket in tickets:
            dealer.send(messages.encode(Done(ticket)))
        assert load(folder, exchange(0, port)).loaded.source == "peer"
        _ticket(dealer, runner)  # and nothing more: its process has ended
        _ticket(dealer, runner)
        assert runner.weight_server is not None
        monkeypatch.setattr(sender, "SESSION_S", 0.0)
        assert load(folder, exchange(0, port)).loaded.source == "peer"


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"\xc1"], [b"a", b"b"], [msgspec.msgpack.encode({"type": "Hello", "version": "1"})], [bytes(4000)]],
    ids=["empty", "no msgpack", "two frames", "types", "long"],
)
def test_the_server_goes_on_when_a_member_sends(source: tuple[Path, ModelRunner, int], frames: list[bytes]) -> None:
    folder, runner, port = source
    assert runner.weight_server is not None
    before = runner.weight_server.faults
    with _member(port) as dealer:
        dealer.send_multipart(frames)
        ticket = _ticket(dealer, runner)
        dealer.send(messages.encode(Done(ticket)))
    assert runner.weight_server.faults == before + 1
    assert load(folder, exchange(0, port)).loaded.source == "peer"


@contextmanager
def _answering(peer: Peer) -> Iterator[int]:
    """Runs a peer in threads of its own, and yields its port."""
    port = free_port()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = PeerAuthenticator(context, SECRET)
    router = context.socket(zmq.ROUTER)
    secure_server(router, SECRET)
    router.bind(f"tcp://{HOST}:{port}")
    listening = socket.create_server((HOST, port + 1))

    def answer() -> None:
        while not stopping.is_set():
            if not router.poll(20):
                continue
            name, payload = router.recv_multipart()
            request = messages.decode_request(payload)
            if isinstance(request, Hello):
                router.send_multipart([name, peer.greeted()])
            elif not isinstance(request, Done) and (digests := peer.digests()):
                router.send_multipart([name, digests])

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the receiver ends when it has seen enough
            peer.serve(connection)

    def accept() -> None:
        with suppress(OSError):  # the test has closed the port
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    stopping = threading.Event()
    threads = [threading.Thread(target=each, daemon=True) for each in (answer, accept)]
    for thread in threads:
        thread.start()
    try:
        yield port
    finally:
        stopping.set()
        threads[0].join()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        authenticator.close()
        context.destroy(linger=0)


@contextmanager
def _member(port: int) -> Iterator["zmq.Socket[bytes]"]:
    """A member's connection to the control port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    secure_client(dealer, SECRET)
    dealer.connect(f"tcp://{HOST}:{port}")
    try:
        yield dealer
    finally:
        context.destroy(linger=500)


def _ticket(dealer: "zmq.Socket[bytes]", runner: ModelRunner) -> bytes:
    assert runner.weight_server is not None
    dealer.send(messages.encode(Hello(messages.VERSION, runner.weight_server.identity)))
    assert dealer.poll(60_000)
    reply = messages.decode_reply(dealer.recv())
    assert isinstance(reply, Offer)
    return reply.ticket
