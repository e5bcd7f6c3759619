"""Logits of the tokens that a head may guess are the model's, in their places, and all others are -inf."""

from pathlib import Path

import pytest
import torch

from mini_infer_engine.ops.base import ResidualState
from mini_infer_engine.ops.torch_ops import TorchOps
from mini_infer_engine.runtime.draft_vocabulary import DraftVocabulary
from tests.support.tiny_models import save_tiny_model, tiny_runner

TOKEN_IDS = torch.tensor([0, 3, 77, 150, 198])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reads_rows", [False, True])
def test_draft_logits_of_a_part_of_the_vocabulary(
    tmp_path: Path, tied: bool, reads_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From their rows of the output matrix, and from all logits where the matrix is not in the model's dtype."""
    monkeypatch.setattr("mini_infer_engine.layers.linear.blocked_weight", lambda _: None)
    save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=tied)
    model = tiny_runner(tmp_path).worker.model
    if not reads_rows:
        model.head.blocked = model.head.weight  # as where the weights are kept in another order
    vocabulary = DraftVocabulary(model, TOKEN_IDS, 4, torch.float32)
    assert (vocabulary._rows is not None) == reads_rows
    model.head.blocked = None
    for rows in (3, 4, 1):
        hidden = torch.randn(rows, 64)
        logits, whole = vocabulary.logits(TorchOps(), hidden), model.logits(TorchOps(), ResidualState(hidden.clone()))
        torch.testing.assert_close(logits[:, TOKEN_IDS], whole[:, TOKEN_IDS])
        assert logits.isfinite().sum() == rows * len(TOKEN_IDS)
        assert logits.shape == whole.shape


def test_all_logits_are_written_to_the_output_when_the_draft_has_no_vocabulary_of_its_own(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    model = tiny_runner(tmp_path).worker.model
    hidden = torch.randn(2, 64)
    logits = DraftVocabulary(model, None, 4, torch.float32).logits(TorchOps(), hidden)
    torch.testing.assert_close(logits, model.logits(TorchOps(), ResidualState(hidden)))
