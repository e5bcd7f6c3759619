"""Sparse attention on a GPU: logits of a random model are near those of transformers, but where a choice flips.

A score's rounding may turn the choice of the last tokens that are read, here 40 of up to 150, and what they change is
little. A wrong choice, rotation or address changes all.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_runner, make_settings
from tests.support.tiny_models import DEEPSEEK_V32, PageDealer, reference_logits, run_chunks, save_tiny_model

pytestmark = GPU_ONLY
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(150)]


@pytest.mark.parametrize("attention_backend", ["auto", "torch"])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("deepseek_v32", {}),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"], "n_group": 1, "topk_group": 1}),
    ],
)
def test_logits_are_near_transformers_whole_chunked_and_token_by_token(
    architecture: str, changes: dict[str, Any], attention_backend: str, tmp_path: Path
) -> None:
    shape = DEEPSEEK_V32 | {"hidden_size": 128, "index_topk": 40} | changes
    expected = reference_logits(save_tiny_model(tmp_path, architecture, **shape), TOKENS)
    settings = {"enforce_eager": True, "page_size": 16, "attention_backend": attention_backend}
    runner = make_runner(make_settings(tmp_path, **settings))
    dealer = PageDealer(runner)
    for sizes in ([150], [33, 1, 116], [100] + [1] * 50):
        actual = run_chunks(runner, TOKENS, dealer.table(150), sizes).cpu()
        assert (actual - expected)[:40].abs().max() <= 1e-3, "all tokens are read"
        similarity = torch.nn.functional.cosine_similarity(actual, expected)
        assert similarity.median() > 0.9999, sizes
        assert similarity.min() > 0.8, sizes
