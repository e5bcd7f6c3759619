import numpy as np
import torch

from mini_infer_engine.core.batch import TokenMasks
from mini_infer_engine.core.grammars.matcher import mask_of
from mini_infer_engine.sampling.token_masks import apply_token_masks


def test_a_token_mask_applies_to_its_row_only() -> None:
    vocab_size = 70  # no multiple of a word
    logits = torch.arange(3.0 * vocab_size).view(3, vocab_size)
    before = logits.clone()
    bits = np.stack([mask_of([0, 31, 32, 69], vocab_size), mask_of([5], vocab_size)])
    apply_token_masks(logits, TokenMasks([4, 9], bits), [(2, 0), (4, 0), (7, 0)])
    assert torch.equal(logits[0], before[0])
    assert torch.equal(logits[2], before[2])
    assert logits[1].isfinite().nonzero().flatten().tolist() == [0, 31, 32, 69]
    assert torch.equal(logits[1, [0, 31, 32, 69]], before[1, [0, 31, 32, 69]])


def test_a_row_has_a_token_mask_for_each_draft_position() -> None:
    logits = torch.zeros(4, 40)
    bits = np.stack([mask_of([token], 40) for token in (3, 5, 7)])
    apply_token_masks(logits, TokenMasks([1, 1, 2], bits, [0, 1, 0]), [(0, 0), (1, 0), (1, 1), (2, 0)])
    assert [row.isfinite().nonzero().flatten().tolist() for row in logits[1:]] == [[3], [5], [7]]
    assert logits[0].isfinite().all()
