"""Who may exchange keys and values with whom, and what makes two checkpoints the same."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core_process.kv_transfer import begin_identity
from mini_infer_engine.gguf.folder import model_folder
from mini_infer_engine.kv_transfer.layout import KVLayout
from mini_infer_engine.kv_transfer.protocol.checkpoint_digest import checkpoint_digest
from mini_infer_engine.kv_transfer.protocol.handshake import handshake_refusal
from mini_infer_engine.kv_transfer.protocol.wire import VERSION, Party, RankAddress, TransportAddress
from mini_infer_engine.kv_transfer.topology.path_selection import Place
from tests.support.gguf_files import write_gguf

PLACE = Place(ipc_domain="", has_rdma=False)
PARTY = Party(
    version=VERSION,
    engine_id="a",
    role="prefill",
    weights="abc",
    layout=KVLayout(num_layers=1, halves=2, page_size=16, num_heads=2, head_bytes=8, dtype="float32"),
    where=TransportAddress("nixl", [RankAddress(metadata=b"", address=0, device="cpu", device_index=0, place=PLACE)]),
)


def test_the_handshake_accepts_other_names_roles_and_page_sizes() -> None:
    other = replace(PARTY, engine_id="b", role="decode", layout=replace(PARTY.layout, page_size=128))
    assert handshake_refusal(PARTY, other) == ""


@pytest.mark.parametrize(
    ("ours", "theirs", "meets"),
    [
        ("cuda-ipc+nixl", "cuda-ipc+nixl", True),
        ("cuda-ipc+nixl", "nixl", True),
        ("cuda-ipc", "cuda-ipc+nixl", True),
        ("cuda-ipc+nixl", "nixl-host", False),
        ("cuda-ipc", "nixl", False),
        ("shm", "nixl", False),
    ],
)
def test_the_handshake_accepts_peers_when_they_share_one_transport(ours: str, theirs: str, meets: bool) -> None:
    here, there = (replace(PARTY, where=replace(PARTY.where, transport=name)) for name in (ours, theirs))
    refusal = handshake_refusal(here, there)
    assert refusal == "" if meets else "--kv-transport" in refusal


@pytest.mark.parametrize(
    ("changes", "message_part"),
    [
        ({"version": VERSION + 1}, "version"),
        ({"weights": "abd"}, "weights differ"),
        ({"where": replace(PARTY.where, transport="other")}, "--kv-transport"),
        ({"layout": replace(PARTY.layout, dtype="int8")}, "dtype of the KV cache is float32 here and int8 there"),
    ],
)
def test_the_handshake_refuses_a_peer_with_the_reason(changes: dict[str, object], message_part: str) -> None:
    assert message_part in handshake_refusal(PARTY, replace(PARTY, **changes))


def test_the_digest_of_a_checkpoint_depends_on_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (first / "model.safetensors").write_bytes(b"weights")
    (second / "other-name.safetensors").write_bytes(b"weights")
    digest = checkpoint_digest(first)
    assert digest == checkpoint_digest(second) == checkpoint_digest(first)
    (second / "other-name.safetensors").write_bytes(b"weighty")
    assert checkpoint_digest(second) != digest
    (first / "config.json").write_text('{"layers": 2}')
    assert checkpoint_digest(first) != digest


def test_the_digest_is_another_when_weights_were_replaced_by_some_of_the_same_size_and_time(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    digests = []
    for content in (b"before", b"after!"):
        weights.write_bytes(content)
        os.utime(weights, ns=(0, 0))  # as archives that are made reproducibly have it
        digests.append(checkpoint_digest(tmp_path))
        time.sleep(0.02)  # the clock of file systems has steps of up to 10 ms
    assert digests[0] != digests[1]


def test_the_digest_of_a_gguf_model_depends_on_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second, third = (tmp_path / name for name in ("first.gguf", "second.gguf", "third.gguf"))
    write_gguf(first, "llama")
    second.write_bytes(first.read_bytes())
    write_gguf(third, "llama", tensors={"output_norm.weight": np.full(64, 2, np.float32)})
    same, copied, other = (checkpoint_digest(model_folder(path)) for path in (first, second, third))
    assert same == copied != other


def test_a_digest_is_cached_elsewhere_when_the_model_folder_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / ".mini-infer-digests.json").mkdir()  # nobody can write a file there, not even root
    digest = checkpoint_digest(folder)
    assert list((tmp_path / "cache").rglob("*.json"))
    monkeypatch.setattr("hashlib.file_digest", None)  # it is not computed again
    assert checkpoint_digest(folder) == digest


def test_the_identity_differs_when_weights_are_quantised_otherwise() -> None:
    def weights(**options: Any) -> str:
        return begin_identity(EngineSettings(model="demo", device="cpu", **options), None).result()

    found = [
        weights(),
        weights(quantization="int8"),
        weights(quantization="int4"),
        weights(quantization="int4", quantization_calibration="none"),
        weights(quantization="int8", quantize_lm_head=True),
        weights(quantization="int8", quantize_lm_head=True, quantize_embeddings=True),
    ]
    assert len(set(found)) == len(found)
    assert weights(quantization="int8", quantization_calibration="none") == found[1], "int8 is not calibrated"
