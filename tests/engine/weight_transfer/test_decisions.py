"""The source of weights, and the rate at which a peer is too slow, are decided as tables say."""

import pytest

from mini_infer_engine.weight_transfer.addresses import split_address
from mini_infer_engine.weight_transfer.decisions import asks_peers, transfer_fault
from mini_infer_engine.weight_transfer.exchange import LoadedWeights
from mini_infer_engine.weight_transfer.messages import TensorSpec
from mini_infer_engine.weight_transfer.pieces import Piece, manifest_fault, pieces_of


@pytest.mark.parametrize(
    ("source", "rate", "is_recomputed", "expected"),
    [
        ("files", 1e6, True, False),
        ("peers", 9e9, False, True),
        ("auto", 9e9, False, False),
        ("auto", 9e9, True, True),
        ("auto", 0.2e9, False, True),
        ("auto", None, False, True),
    ],
    ids=["files", "peers", "page cache", "calibrated", "slow files", "unknown rate"],
)
def test_peers_are_asked_when_files_would_take_longer(
    source: str, rate: float | None, is_recomputed: bool, expected: bool
) -> None:
    assert asks_peers(source, rate, is_recomputed=is_recomputed) is expected


@pytest.mark.parametrize(
    ("done", "elapsed_s", "idle_s", "rate", "reason"),
    [
        (0, 0.5, 0.5, 1e9, ""),
        (0, 4.0, 3.5, None, "no byte"),
        (0, 1.5, 1.5, 1e9, "GB/s"),
        (1_000_000_000, 2.0, 0.0, 1e9, "GB/s"),
        (6_000_000_000, 8.0, 0.0, 1e9, ""),
        (1_000_000_000, 2.0, 0.0, None, ""),
        (1_000_000_000, 0.9, 0.0, 9e9, ""),
        (10_000_000_000, 99.0, 0.0, 9e9, ""),
    ],
    ids=["begins", "stalls", "has sent nothing", "slower", "rest is short", "no files", "too early", "complete"],
)
def test_a_transfer_is_given_up_when_it(
    done: int, elapsed_s: float, idle_s: float, rate: float | None, reason: str
) -> None:
    found = transfer_fault(done=done, total=10_000_000_000, elapsed_s=elapsed_s, idle_s=idle_s, file_bytes_per_s=rate)
    assert bool(found) is bool(reason)
    assert reason in found


def test_pieces_cover_each_tensor_once_when_it_is_longer_than_one() -> None:
    specs = [TensorSpec("a", "d", (25,), 25), TensorSpec("b", "d", (0,), 0), TensorSpec("c", "d", (10,), 10)]
    assert pieces_of(specs, 10) == [Piece(0, 0, 10), Piece(0, 10, 20), Piece(0, 20, 25), Piece(2, 0, 10)]


@pytest.mark.parametrize(
    "theirs",
    [
        [],
        [TensorSpec("b", "bf16", (2, 3), 12)],
        [TensorSpec("a", "fp16", (2, 3), 12)],
        [TensorSpec("a", "bf16", (3, 2), 12)],
        [TensorSpec("a", "bf16", (2, 3), 24)],
    ],
    ids=["count", "name", "dtype", "shape", "bytes"],
)
def test_a_manifest_is_refused_when_it_differs_in(theirs: list[TensorSpec]) -> None:
    ours = [TensorSpec("a", "bf16", (2, 3), 12)]
    assert not manifest_fault(ours, list(ours))
    assert manifest_fault(ours, theirs)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("a:5560", ("a", 5560)), ("tcp://10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:9", ("::1", 9))],
)
def test_an_address_is_split_when_it_has_a_port(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", "a", "a:", ":5", "a:x", "a:0", "a:65536", "a:١"])
def test_an_address_is_refused_when_it_is(address: str) -> None:
    with pytest.raises(ValueError, match="weights-peers"):
        split_address(address)


def test_a_load_is_described_by_its_source_bytes_and_rate() -> None:
    loaded = LoadedWeights(source="peer", peer="node-1:5560", num_bytes=14_200_000_000, seconds=1.45)
    assert str(loaded) == "weights from peer node-1:5560, 14.2 GB, 9.8 GB/s"
    fallback = LoadedWeights(num_bytes=1_000_000_000, seconds=1.0, fallback="busy")
    assert str(fallback) == "weights from files, 1.0 GB, 1.0 GB/s (not from a peer: busy)"
