"""Layers of transformers that our operations compute: which are recognised, and that their results stay the same."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.models.transformers_backend.model import TransformersModel
from mini_infer_engine.models.transformers_backend.recognition import is_llama_norm, llama_layer, only_passes_states_on
from mini_infer_engine.runtime.model_runner import load_runner
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]


class ScaledMLP(LlamaMLP):
    """A block that differs from Llama's by a factor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down_proj: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)
        return down_proj


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_equal_transformers_when_layers_are_recognised(architecture: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, architecture)
    assert all(llama_layer(layer) is not None for layer in model.model.layers)
    assert only_passes_states_on(model.model)
    expected = reference_logits(model, TOKENS)
    settings = EngineSettings(
        model=str(tmp_path), model_impl="transformers", device="cpu", kv_cache_memory=2**22, max_num_seqs=8
    )
    runner = load_runner(settings)
    ours = runner.worker.model
    assert isinstance(ours, TransformersModel)
    attention = ours.causal.model.layers[0].self_attn
    pointers = {layer.weight.untyped_storage().data_ptr() for layer in (attention.q_proj, attention.k_proj)}
    assert len(pointers) == 1, "siblings lie side by side"
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    assert (actual - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("architecture", ["olmo2", "granite", "gemma2"])
def test_layers_stay_as_they_are_when_their_code_is_another(architecture: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, architecture)
    assert [llama_layer(layer) for layer in model.model.layers] == [None] * len(model.model.layers)


def test_a_layer_stays_as_it_is_when_one_of_its_parts_differs(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "llama")
    changed, gelu, hooked, odd = model.model.layers[0], *(save_tiny_model(tmp_path, "llama").model.layers[:3])
    changed.mlp = ScaledMLP(model.config)
    gelu.mlp.act_fn = nn.GELU()
    hooked.input_layernorm.register_forward_hook(lambda *_: None)
    odd.self_attn.q_proj = nn.Sequential(odd.self_attn.q_proj)
    assert [llama_layer(layer) for layer in (changed, gelu, hooked, odd)] == [None] * 4
    assert is_llama_norm(gelu.input_layernorm)
    assert not is_llama_norm(hooked.input_layernorm)


class Collecting(LlamaModel):
    """A decoder that keeps the outputs of its layers."""

    def forward(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        kept = []
        for layer in self.layers:
            hidden_states = layer(hidden_states)
            kept.append(hidden_states)
        return kept


class Adding(LlamaModel):
    """A decoder that reads its input again in the end."""

    def forward(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states + inputs_embeds


@pytest.mark.parametrize("decoder", [Collecting, Adding])
def test_layers_stay_as_they_are_when_the_decoder_reads_their_states_again(decoder: type, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "llama")
    assert not only_passes_states_on(decoder(model.config))
