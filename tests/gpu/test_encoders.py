"""Encoders of the pooling engine on a GPU: their embeddings equal those of transformers on a CPU."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from tests.engine.pooling.test_encoders import LONG, embedded, states, tokenized
from tests.gpu.device import GPU_ONLY
from tests.support.pooling_models import ENCODERS, pooling_llm, save_encoder

pytestmark = GPU_ONLY
TOLERANCE = 1e-4
"""Sums of fp32 in another order than a CPU's."""


@pytest.mark.parametrize("model_type", ENCODERS)
def test_embeddings_equal_transformers_when_a_gpu_pools_the_first_token(model_type: str, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, model_type)
    llm = pooling_llm(tmp_path, device="cuda", dtype="float32")
    for text, vector in zip(LONG, embedded(llm, LONG), strict=True):
        inputs = {"input_ids": tokenized(tmp_path, text)["input_ids"]}
        assert torch.allclose(vector, normalize(states(model, inputs)[0], dim=-1), atol=TOLERANCE)
