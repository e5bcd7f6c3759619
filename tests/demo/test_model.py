import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from demo.dataset import END
from demo.generate import greedy
from demo.model import Qwen3, Shape
from demo.tokenizer import ASSETS

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The shipped configuration with two layers and random weights, as training exports it."""
    path = tmp_path_factory.mktemp("demo")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / name, path)
    config = json.loads((ASSETS / "config.json").read_text()) | {"num_hidden_layers": 2}
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = Qwen3(Shape.from_config(path / "config.json"))
    model.initialise()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    save_file({k: v.bfloat16() for k, v in model.state_dict().items()}, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def model(folder):
    from safetensors.torch import load_file

    model = Qwen3(Shape.from_config(folder / "config.json"))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.float().eval()


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_logits_equal_those_of_transformers(model, reference):
    ids = torch.randint(0, 4096, (2, 700), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = model.logits(model.hidden(ids, torch.float32, compiled=False))
        theirs = reference(ids).logits
    assert (ours - theirs).abs().max() < 1e-4


def test_batched_greedy_equals_transformers_one_by_one(model, reference):
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(10, 4096, (n,), generator=generator).tolist() for n in (3, 9, 4, 17)]
    for prompt, ours in zip(prompts, greedy(model, prompts, max_new_tokens=12), strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = reference.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert ours == (out[: out.index(END)] if END in out else out)
