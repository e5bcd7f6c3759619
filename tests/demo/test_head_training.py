"""What a head that is trained for a model may guess, and how it is written down."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from demo.train_draft import write_folder
from demo.train_model_head import frequent_tokens
from mini_infer_engine.speculation.head import HeadShape, SpeculativeHead, load_head


def test_the_tokens_that_stand_most_often_are_kept() -> None:
    made = torch.tensor([9, 4, 9, 2, 4, 9, 7])
    assert frequent_tokens(made, 12, 2).tolist() == [4, 9]
    assert frequent_tokens(made, 12, 6).tolist() == [0, 1, 2, 4, 7, 9], "then those with the lower numbers"


def test_a_written_head_is_what_the_engine_loads(tmp_path: Path) -> None:
    shape = HeadShape(16, width=8, intermediate_size=12, layers=(0, 2), draft_vocab_size=3)
    head = SpeculativeHead(shape)
    head.d2t.copy_(torch.tensor([1, 300, 699]))
    write_folder(tmp_path, head, shape.to_config(), {"steps": 1})
    assert load_file(tmp_path / "model.safetensors")["d2t"].dtype == torch.int64
    assert json.loads((tmp_path / "training.json").read_text()) == {"steps": 1}
    loaded = load_head(tmp_path, 16, 3, 702, torch.device("cpu"), torch.float32, dummy=False, seed=0)
    assert loaded.token_ids is not None
    assert loaded.token_ids.tolist() == [1, 301, 701]
    torch.testing.assert_close(loaded.out.weight, head.out.weight.bfloat16().float())
