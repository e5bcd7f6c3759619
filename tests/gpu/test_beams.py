"""Beam search by graphs of decode rows: the beams and scores of plain torch on the same device, whoever is beside."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.request import BeamSearch, Output, Request, SamplingParams
from mini_infer_engine.runtime.cuda.graphs import DecodeGraph, PrefillGraph
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests
from tests.support.tiny_models import save_tiny_model

pytestmark = GPU_ONLY
SEARCHES = 3
WIDTH = 4
TOKENS = 40


def searches() -> list[Request]:
    """Prompts that end within a page and at its end; one after the other shares a beginning."""
    found = []
    for index, length in enumerate((13, 32, 150)):
        names = [f"beam {index}.{place}" for place in range(WIDTH)]
        found.append(
            Request(
                request_id=names[0],
                prompt_token_ids=[(place * 37 + index // 2) % 190 + 5 for place in range(length)],
                sampling=SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2),
                beam_search=BeamSearch(request_ids=names, early_stopping="never"),
            )
        )
    assert len(found) == SEARCHES
    return found


def beams(directory: Path, beside: list[Request], **changes: Any) -> dict[str, Output]:
    settings = make_settings(directory, **changes)
    engine = make_engine(settings, make_runner(settings))
    for request in [*searches(), *beside]:
        engine.add(request)
    made: dict[str, Output] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            if output.request_id.startswith("beam"):
                made[output.request_id] = output
    assert len(made) == SEARCHES * WIDTH
    return made


@pytest.mark.parametrize("are_alone", [True, False])
@pytest.mark.parametrize("page_size", [16, 128])
def test_beams_equal_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_size: int, are_alone: bool) -> None:
    save_tiny_model(tmp_path, "qwen3", head_dim=64)
    beside = [] if are_alone else mixed_requests(12, 199, 200, "beside", outputs=(10, 40))
    expected = beams(tmp_path, [], attention_backend="torch", page_size=page_size)
    decoded, computed = list[int](), list[int]()
    run_decodes, run_prompts = DecodeGraph.run, PrefillGraph.run

    def count_decodes(graph: DecodeGraph, rows: list[Row], continued: list[Row]) -> None:
        decoded.append(len(rows))
        run_decodes(graph, rows, continued)

    def count_prompts(graph: PrefillGraph, decodes: list[Row], prompts: list[Row]) -> None:
        computed.extend(row.count for row in prompts)
        run_prompts(graph, decodes, prompts)

    monkeypatch.setattr(DecodeGraph, "run", count_decodes)
    monkeypatch.setattr(PrefillGraph, "run", count_prompts)
    made = beams(tmp_path, beside, attention_backend="triton", page_size=page_size)
    for name, output in expected.items():
        assert made[name].token_ids == output.token_ids, name
        assert made[name].beam_score == pytest.approx(output.beam_score, abs=1e-4)
        assert [one.top_token_ids for one in made[name].logprobs] == [one.top_token_ids for one in output.logprobs]
    assert sum(decoded) >= SEARCHES * WIDTH * (TOKENS - 2)
    assert 1 not in computed or not are_alone, "beams are decode rows, not chunks of prompts"
