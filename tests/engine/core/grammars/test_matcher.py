import random

import numpy as np

from mini_infer_engine.core.grammars.matcher import TokenSet, has_tokens, mask_of

VOCAB_SIZE = 10_000


def test_masks_are_searched_for_any_or_for_named_tokens() -> None:
    draw = random.Random(0)
    named = (3, 32, 9_999)
    for _ in range(50):
        allowed = [draw.sample(range(VOCAB_SIZE), draw.choice([0, 1, 1, 5, 300])) for _ in range(4)]
        allowed[0] += draw.sample(named, draw.choice([0, 1, 3]))
        masks = np.stack([mask_of(tokens, VOCAB_SIZE) for tokens in allowed])
        assert has_tokens(masks).tolist() == [bool(tokens) for tokens in allowed]
        assert TokenSet(named).are_in(masks).tolist() == [not set(named).isdisjoint(tokens) for tokens in allowed]
    assert has_tokens(masks[:0]).tolist() == []
    assert TokenSet(()).are_in(masks).tolist() == [False] * 4
