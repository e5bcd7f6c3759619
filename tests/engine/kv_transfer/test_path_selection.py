"""By which way keys and values go: tables of places, layouts and sizes."""

import pytest
from msgspec.structs import replace

from mini_infer_engine.kv_transfer.layout import KVLayout, Span
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.topology.locality import read_place
from mini_infer_engine.kv_transfer.topology.path_selection import (
    DIRECT_RATES,
    MAPPED_RATES,
    Place,
    choose_path,
    direct_rate,
    is_direct,
    mapping_pays,
)

WHOLE = KVLayout(num_layers=28, halves=2, page_size=128, num_heads=4, head_bytes=256, dtype="bfloat16")
"""Of Qwen2.5-7B on one GPU."""
HALVED = replace(WHOLE, num_heads=2, tp_size=2)


@pytest.mark.parametrize(
    ("theirs", "tokens", "layers", "expected"),
    [
        (WHOLE, 4096, None, None),  # pieces of 7 MB
        (WHOLE, 4096, (3, 4), None),  # and of 256 KB
        (HALVED, 4096, None, "device"),  # and of 512 bytes
        (HALVED, 4096, (3, 4), "device"),
        (replace(WHOLE, page_size=16), 4096, None, "device"),  # 16 KB
        (replace(WHOLE, page_size=16), 16, (3, 4), None),  # two pieces are not worth three messages
        (replace(WHOLE, dtype="float32", head_bytes=512), 16, None, "device"),
    ],
)
def test_the_staging_path_is_chosen_when_pieces_are_small_or_dtypes_differ(
    theirs: KVLayout, tokens: int, layers: tuple[int, int] | None, expected: Area | None
) -> None:
    span = Span([], [], 0, tokens, layers)
    assert choose_path(WHOLE, theirs, span, device="cuda", can_be_direct=True, through_host=False) == expected
    on_cpu = choose_path(WHOLE, theirs, span, device="cpu", can_be_direct=True, through_host=False)
    assert on_cpu in (None, "host")
    for can_be_direct, through_host in ((False, False), (True, True)):
        chosen_path = choose_path(
            WHOLE, theirs, span, device="cuda", can_be_direct=can_be_direct, through_host=through_host
        )
        assert chosen_path == "host"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_direct_rates_grow_with_the_size_of_pieces(device: str) -> None:
    table = DIRECT_RATES[device]
    rates = [direct_rate(size, table) for size in (256, 512, 1 << 14, 1 << 15, 1 << 18, 1 << 20, 1 << 24)]
    assert rates == sorted(rates)
    assert direct_rate(table[0][0] // 2, table) == table[0][1] / 2
    assert direct_rate(table[1][0], table) == table[1][1]


@pytest.mark.parametrize(
    ("theirs", "tokens", "layers", "nixl_area", "expected"),
    [
        (WHOLE, 4096, None, None, True),
        (WHOLE, 128, (3, 4), None, True),
        (replace(WHOLE, page_size=16), 4096, None, None, True),
        (replace(WHOLE, page_size=16), 4096, None, "device", True),
        (HALVED, 4096, None, None, True),
        (HALVED, 4096, (3, 4), "device", True),
        (HALVED, 4096, None, "device", True),
        (WHOLE, 32_768, None, None, False),  # of so many whole pages NIXL's start is no part
    ],
)
def test_mapped_copies_are_chosen_when_they_are_estimated_faster(
    theirs: KVLayout, tokens: int, layers: tuple[int, int] | None, nixl_area: Area | None, expected: bool
) -> None:
    assert mapping_pays(WHOLE, theirs, Span([], [], 0, tokens, layers), nixl_area) is expected


def test_nixl_is_chosen_when_it_is_estimated_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tuple((size, rate / 10) for size, rate in MAPPED_RATES)
    monkeypatch.setattr("mini_infer_engine.kv_transfer.topology.path_selection.MAPPED_RATES", slow)
    assert not mapping_pays(WHOLE, WHOLE, Span([], [], 0, 8192), None)
    assert mapping_pays(WHOLE, WHOLE, Span([], [], 0, 16, (3, 4)), None), "it begins sooner"


HERE, THERE = Place(ipc_domain="a", has_rdma=False), Place(ipc_domain="b", has_rdma=False)


@pytest.mark.parametrize(
    ("ours", "our_device", "theirs", "their_device", "expected"),
    [
        (HERE, "cuda", HERE, "cuda", True),
        (HERE, "cuda", THERE, "cuda", False),
        (Place(ipc_domain="a", has_rdma=True), "cuda", Place(ipc_domain="b", has_rdma=True), "cuda", True),
        (Place(ipc_domain="", has_rdma=False), "cuda", Place(ipc_domain="", has_rdma=False), "cuda", False),
        (HERE, "cpu", THERE, "cpu", True),
        (HERE, "cuda", HERE, "cpu", False),
    ],
)
def test_gpus_reach_each_other_by_cuda_ipc_or_rdma(
    ours: Place, our_device: str, theirs: Place, their_device: str, expected: bool
) -> None:
    assert is_direct(ours, our_device, theirs, their_device) == expected
    assert is_direct(theirs, their_device, ours, our_device) == expected


@pytest.mark.parametrize(
    ("allowed", "ipc", "rdma"),
    [
        ("", "a", True),
        ("all", "a", True),
        ("tcp,sm,cuda_copy", "", False),
        ("tcp,cuda_ipc", "a", False),
        ("rc,cuda_copy", "", True),
        ("dc_mlx5,cuda_copy", "", True),
        ("^rc_mlx5", "a", True),
        ("^cuda_ipc", "", True),
        ("^ib", "a", False),
    ],
)
def test_locality_respects_ucx_tls(allowed: str, ipc: str, rdma: bool) -> None:
    expected = Place(ipc_domain=ipc, has_rdma=rdma)
    assert read_place({"UCX_TLS": allowed}, "a", has_rdma_device=True) == expected
    assert not read_place({"UCX_TLS": allowed}, "a", has_rdma_device=False).has_rdma
