"""The order in which graphs are captured, and the one that a pass gets meanwhile. It needs triton, but no GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from mini_infer_engine.core.batch import Row
from mini_infer_engine.runtime.cuda import captured_graphs
from mini_infer_engine.runtime.cuda.captured_graphs import CapturedGraphs
from mini_infer_engine.runtime.cuda.graph_sizes import GraphSizes
from mini_infer_engine.runtime.cuda.graphs import CapturedModel

pytestmark = pytest.mark.gpu
SHAPES = {32: 0, 64: 0, 128: 0, 256: 0}
LOADS: Any = "loads"


class FakeSampling:
    def __init__(self) -> None:
        self.sizes = GraphSizes([1, 2, 8])

    def bucket(self, rows: int) -> int:
        self.sizes.requested(rows)
        return self.sizes.fitting(rows)

    def capture(self, rows: int, memory: object) -> None:
        self.sizes.captured(rows)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets the kind and size of each graph that is captured. A graph has room for prompts of its number of tokens."""
    captured = list[str]()

    class FakeGraph:
        num_decodes = 0

        def __init__(self, model: CapturedModel, size: int, *shape: object) -> None:
            self.num_tokens = size
            is_decode = len(shape) == 1
            captured.append(f"{'decode' if is_decode else 'prefill' if model.loads is None else 'following'} {size}")

        def fits(self, tokens: int, decodes: int, prefills: list[Row]) -> bool:
            return tokens <= self.num_tokens

    for kind in ("DecodeGraph", "PrefillGraph"):
        monkeypatch.setattr(captured_graphs, kind, FakeGraph)
    monkeypatch.setattr(captured_graphs, "GraphMemory", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return captured


def graphs(*, enforce_eager: bool = False) -> CapturedGraphs:
    fields: dict[str, Any] = dict.fromkeys(CapturedModel.__dataclass_fields__)
    settings, sampling = SimpleNamespace(enforce_eager=enforce_eager), FakeSampling()
    config = SimpleNamespace(model_impl="native")
    return CapturedGraphs(CapturedModel(**fields), SHAPES, sampling, None, config, settings)  # type: ignore[arg-type]  # stand-ins


def prompt(tokens: int) -> list[Row]:
    return [Row(0, 0, tokens, [0] * tokens, [0], None)]


def tokens_of(graph: Any) -> int | None:
    return None if graph is None else graph.num_tokens


def test_all_graphs_are_captured_largest_first_when_nothing_is_deferred(order: list[str]) -> None:
    made = graphs()
    made.capture(None, LOADS, defers=False)
    kinds = (("prefill", [256, 128, 64, 32]), ("following", [256, 128, 64, 32]), ("decode", [8, 2, 1]))
    assert order == [f"{kind} {size}" for kind, sizes in kinds for size in sizes]
    assert list(made.deferred()) == []
    assert [tokens_of(made.prefill(0, prompt(tokens))) for tokens in (1, 33, 64, 256, 257)] == [32, 64, 64, 256, None]
    assert tokens_of(made.following(made.prefill_graphs[64])) == 64


def test_graphs_that_passes_lacked_are_captured_first_when_most_are_deferred(order: list[str]) -> None:
    made = graphs()
    made.capture(None, LOADS, defers=True)
    assert order == ["prefill 256", "prefill 128", "prefill 32", "decode 8", "decode 1"]
    order.clear()
    assert list(made.deferred(only_missed=True)) == [], "no pass has lacked one yet"
    graph = made.prefill(0, prompt(50))
    assert tokens_of(graph) == 128, "a larger one meanwhile"
    assert graph is not None
    assert made.following(graph) is None
    for capture in made.deferred(only_missed=True):
        capture()
    assert order == ["prefill 64", "following 128"]
    assert tokens_of(made.prefill(0, prompt(50))) == 64
    made.decode(2)
    for capture in made.deferred():
        capture()
    assert order[2:] == ["decode 2", "following 32", "following 64", "following 256"]


def test_nothing_is_captured_when_eager_is_enforced(order: list[str]) -> None:
    made = graphs(enforce_eager=True)
    made.capture(None, LOADS, defers=True)
    assert list(made.deferred()) == order == []
    assert made.estimate_bytes() == 0
