"""What both engines load for speculation beside each other: a model that walks in circles, and a head for each."""

import json
import random
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.speculation.head import load_head
from mini_infer_engine.speculation.ngram import look_up
from tests.engine.server.dry_server import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import kv_dtype
import speculation
from common.models import CONFIGS, model_folder
from common.speculation_checkpoints import circling_prompts, write_speculation_checkpoints
from common.vllm_acceptance import QUALIFIED_NAME, Acceptance

TARGET = CONFIGS["tiny"] | {"num_hidden_layers": 6, "tie_word_embeddings": False}
GUESSES = 5


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "six layers", TARGET)
        options = SimpleNamespace(target="six layers", draft="tiny", draft_vocab_size=1000)
        folders = speculation.folders_of(options, root)
        reported = list(write_speculation_checkpoints(*folders.values(), str(root / "all")))
    assert reported[0]["checkpoint GB"] > 0
    assert {folder.name for folder in (root / "all").iterdir()} == set(folders)
    return root / "all"


def test_each_token_is_followed_by_the_next_of_its_circle_and_look_up_guesses_all(written: Path) -> None:
    engine = LLM(
        model=str(written / "target"), device="cpu", dtype="bfloat16", max_model_len=512, kv_cache_memory=4_000_000,
        skip_tokenizer_init=True,
    )  # fmt: skip
    prompts = circling_prompts(random.Random(1), 3, 128, 4096)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        first = prompt[0] - prompt[0] % 64
        whole = [first + (prompt[0] + place) % 64 for place in range(228)]
        assert prompt + list(output.outputs[0].token_ids) == whole
        assert look_up(whole[:128], GUESSES, longest=4, shortest=2) == whole[128 : 128 + GUESSES]


def test_our_head_is_read_with_its_own_vocabulary(written: Path) -> None:
    sizes = (TARGET["hidden_size"], TARGET["num_hidden_layers"], TARGET["vocab_size"])
    head = load_head(written / "head", *sizes, torch.device("cpu"), torch.float32, dummy=False, seed=0)
    assert head.token_ids is not None
    assert len(head.token_ids) == 1000
    assert 0.8 < float(head.down.weight.std()) * head.shape.intermediate_size**0.5 < 1.2


def test_the_peers_head_is_what_eagle_3_checkpoints_are(written: Path) -> None:
    config: dict[str, Any] = json.loads((written / "peer_head" / "config.json").read_text())
    tensors: dict[str, Tensor] = load_file(written / "peer_head" / "model.safetensors")
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert (config["vocab_size"], config["draft_vocab_size"], config["num_hidden_layers"]) == (4096, 1000, 1)
    assert config["num_aux_hidden_states"] == len(config["eagle_aux_hidden_state_layer_ids"])
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if "midlayer" not in name}
    width = config["num_aux_hidden_states"] * 64
    assert shapes == {"fc.weight": (64, width), "norm.weight": (64,), "lm_head.weight": (1000, 64), "d2t": (1000,)}
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (32, 128), "of embeddings and hidden states"
    token_ids = torch.arange(1000) + tensors["d2t"]
    assert len(token_ids.unique()) == 1000
    assert int(token_ids.max()) < 4096


def test_the_7b_shapes_head_reads_three_layers(tmp_path: Path) -> None:
    options = SimpleNamespace(target="qwen2.5-7b", draft="qwen2.5-0.5b", draft_vocab_size=32_000)
    folders = speculation.folders_of(options, tmp_path)
    config = json.loads((Path(folders["peer_head"]) / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 14, 25]
    assert (config["head_dim"], config["draft_vocab_size"], config["intermediate_size"]) == (128, 32_000, 9472)


def test_the_peer_gets_methods_and_the_first_acceptance(tmp_path: Path) -> None:
    options = SimpleNamespace(
        smoke=False, target="qwen2.5-7b", draft="qwen2.5-0.5b", draft_vocab_size=0, guesses=2,
        acceptances=[0.5], peer_acceptances=[0.5, 0.8], peer_methods=["draft", "head", "ngram"],
    )  # fmt: skip
    settings, (acceptances,) = speculation.settings_of("vllm", options, tmp_path, 32, tmp_path / "written")
    settings, variants = speculation.with_folders("vllm", settings, speculation.variants_of("vllm", options))
    assert acceptances == [0.5, 0.8]
    assert (settings["load_format"], settings["model"]) == ("auto", str(tmp_path / "written" / "target"))
    assert not {"draft", "head", "peer_head"} & set(settings)
    common = {
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.5, 0.25],
    }
    assert variants == {
        "plain": {},
        "draft": common | {"method": "draft_model", "model": str(tmp_path / "written" / "draft")},
        "head": common | {"method": "eagle3", "model": str(tmp_path / "written" / "peer_head")},
        "ngram": common | {"method": "ngram_gpu", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    }


def test_the_peers_workers_get_another_acceptance_and_count_passes() -> None:
    class Runner:
        rejection_sampler = SimpleNamespace(synthetic_conditional_rates=torch.full((5,), 0.8))

        def execute_model(self, scheduled: str) -> str:
            return f"ran {scheduled}"

    assert QUALIFIED_NAME == "common.vllm_acceptance.Acceptance"
    worker = Acceptance()
    worker.model_runner = Runner()
    worker.set_acceptance(0.6)
    assert torch.equal(Runner.rejection_sampler.synthetic_conditional_rates, torch.full((5,), 0.6))
    assert worker.passes_so_far() == 0
    assert worker.model_runner.execute_model("this") == "ran this"
    assert worker.passes_so_far() == 1


def test_engines_of_a_wave_fit_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_dtype.engines, "is_present", lambda _: True)
    folder = model_folder("qwen2.5-7b", tmp_path)
    options = SimpleNamespace(smoke=False, kinds=["auto", "fp8"], engines=["ours", "vllm"])
    waves = kv_dtype.waves(folder, options, 150e9)
    assert [list(wave) for wave in waves] == [
        [f"{engine}, weights {weights}, KV {kind}" for kind, engine in product(options.kinds, options.engines)]
        for weights in ("bf16", "fp8")
    ]
    for wave in waves:
        settings = [arguments[2] for _, arguments in wave.values()]  # type: ignore[index]  # a tuple
        assert all(one["kv_cache_memory_bytes"] >= 8 * 32_768 * 57_344 // 2 for one in settings)
    assert [len(wave) for wave in kv_dtype.waves(folder, options, 85e9)] == [2, 2, 2, 2]
