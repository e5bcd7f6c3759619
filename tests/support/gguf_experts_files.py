"""GGUF files of models with experts, latents or recurrent layers, as llama.cpp's converter writes them.

Written from the tensors of a Hugging Face checkpoint, by formulas of their own.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Encoding
from safetensors.torch import load_file

from tests.support.gguf_files import interleaved, tiny_vocabulary
from tests.support.tiny_models import save_tiny_model

Tensors = dict[str, np.ndarray]
Writes = Callable[["Converter"], None]


class Converter:
    """One file that is being written."""

    def __init__(self, path: Path, name: str, model: Any, state: dict[str, torch.Tensor]) -> None:
        self.config, self.model = model.config, model
        self.writer = gguf.GGUFWriter(path, name)
        self.names = gguf.get_tensor_name_map(
            next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name), self.layers
        )
        self.state = {key: tensor.numpy() for key, tensor in state.items()}
        self.tensors: dict[str, tuple[np.ndarray, Encoding]] = {}

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    def put(self, name: str, values: np.ndarray, encoding: Encoding = Encoding.F32) -> None:
        self.tensors[name] = np.ascontiguousarray(values), encoding

    def take(self, name: str) -> np.ndarray:
        return self.state.pop(name)

    def stack_experts(self, kinds: dict[str, str]) -> None:
        """Puts the experts of each layer in one tensor; `kinds` has GGUF's names by the checkpoint's."""
        found: dict[tuple[str, str], list[str]] = {}
        for name in sorted(self.state, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
            match = re.fullmatch(r".*layers\.(\d+)\..*experts\.\d+\.(\w+)\.weight", name)
            if match:
                found.setdefault((match[1], match[2]), []).append(name)
        for (layer, kind), names in found.items():
            self.put(f"blk.{layer}.{kinds[kind]}.weight", np.stack([self.take(name) for name in names]))

    def put_others(self, offset: Callable[[str], bool] = lambda name: False) -> None:
        """Puts what is left by the names of the package's table; norms for which `offset` is true plus one."""
        for name in sorted(self.state):
            theirs = self.names.get_name(name, try_suffixes=(".weight", ".bias")) or self.names.get_name(name)
            assert theirs is not None, name
            self.put(theirs, self.state[name] + 1 if offset(name) else self.state[name])

    def write(self, fields: dict[str, int]) -> None:
        config, writer = self.config, self.writer
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(self.layers)
        writer.add_head_count(config.num_attention_heads)
        eps = next(
            getattr(config, key) for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if hasattr(config, key)
        )
        writer.add_layer_norm_rms_eps(eps)
        for key, value in tiny_vocabulary().items():
            add = {str: writer.add_string, int: writer.add_uint32}.get(type(value), writer.add_array)
            add(f"tokenizer.ggml.{key}", value)
        for key, value in fields.items():
            writer.add_uint32(key, value)
        for name, (values, encoding) in self.tensors.items():
            writer.add_tensor(name, values, raw_dtype=encoding)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def write_sparse_gguf(
    path: Path, name: str, *, fields: dict[str, int] | None = None, tensors: Tensors | None = None, **changes: Any
) -> Any:
    """Writes a random tiny model as the architecture `name` of GGUF, and returns transformers' model of it.

    `fields` and `tensors` replace what would be written.
    """
    model_type, writes = FORMS[name]
    folder = path.parent / f"{path.stem}-original"
    model = save_tiny_model(folder, model_type, **changes)
    general = name.partition("+")[0]
    converter = Converter(path, general, model, load_file(folder / "model.safetensors"))
    writes(converter)
    for replaced, values in (tensors or {}).items():
        converter.put(replaced, values)
    converter.write(fields or {})
    return model


# -- Latent attention


def _deepseek(converter: Converter, *, splits: bool) -> None:
    config, writer = converter.config, converter.writer
    rope, heads = config.rope_parameters, config.num_attention_heads
    nope, rotated, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    is_v3 = config.model_type == "deepseek_v3"
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotated)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if splits:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + rotated)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(nope + rotated)
        writer.add_value_length_mla(value)
    else:
        writer.add_head_count_kv(heads)
        writer.add_key_length(nope + rotated)
        writer.add_value_length(value)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    if is_v3:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if (config.n_group or 1) > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    converter.stack_experts({"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"})
    for layer in range(converter.layers):
        correction = converter.state.pop(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", None)
        if correction is not None:
            converter.put(f"blk.{layer}.exp_probs_b.bias", correction)
        if splits:
            both = converter.take(f"model.layers.{layer}.self_attn.kv_b_proj.weight").reshape(heads, nope + value, -1)
            converter.put(f"blk.{layer}.attn_k_b.weight", both[:, :nope].swapaxes(1, 2))
            converter.put(f"blk.{layer}.attn_v_b.weight", both[:, nope:])
    converter.put_others()


# -- gpt-oss


def _gpt_oss(converter: Converter, *, packs: bool) -> None:
    config, writer, rope = converter.config, converter.writer, converter.config.rope_parameters
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for layer in range(converter.layers):
        path = f"model.layers.{layer}.mlp.experts"
        columns = converter.take(f"{path}.gate_up_proj").swapaxes(1, 2)
        weights = {
            "ffn_gate_exps": columns[:, 0::2],
            "ffn_up_exps": columns[:, 1::2],
            "ffn_down_exps": converter.take(f"{path}.down_proj").swapaxes(1, 2),
        }
        exact = {}
        for name, weight in weights.items():
            kind = Encoding.MXFP4 if packs else Encoding.F32
            rows = gguf.quantize(np.ascontiguousarray(weight), kind) if packs else weight
            converter.put(f"blk.{layer}.{name}.weight", rows, kind)
            exact[name] = torch.from_numpy(np.array(gguf.dequantize(rows, kind)) if packs else weight.copy())
        biases = converter.take(f"{path}.gate_up_proj_bias")
        converter.put(f"blk.{layer}.ffn_gate_exps.bias", biases[:, 0::2])
        converter.put(f"blk.{layer}.ffn_up_exps.bias", biases[:, 1::2])
        converter.put(f"blk.{layer}.ffn_down_exps.bias", converter.take(f"{path}.down_proj_bias"))
        converter.put(f"blk.{layer}.attn_sinks.weight", converter.take(f"model.layers.{layer}.self_attn.sinks"))
        experts = converter.model.model.layers[layer].mlp.experts
        with torch.no_grad():
            experts.gate_up_proj[:, :, 0::2] = exact["ffn_gate_exps"].transpose(1, 2)
            experts.gate_up_proj[:, :, 1::2] = exact["ffn_up_exps"].transpose(1, 2)
            experts.down_proj.copy_(exact["ffn_down_exps"].transpose(1, 2))
    converter.put_others()


# -- Mamba-2


def _mamba_layer(converter: Converter, layer: int, path: str, groups: int) -> None:
    for name in [name for name in converter.state if name.startswith(f"{path}.")]:
        values, kind = converter.take(name), name.removeprefix(f"{path}.")
        theirs = {
            "A_log": "ssm_a",
            "D": "ssm_d",
            "dt_bias": "ssm_dt.bias",
            "conv1d.weight": "ssm_conv1d.weight",
            "conv1d.bias": "ssm_conv1d.bias",
            "in_proj.weight": "ssm_in.weight",
            "in_proj.bias": "ssm_in.bias",
            "norm.weight": "ssm_norm.weight",
            "out_proj.weight": "ssm_out.weight",
            "out_proj.bias": "ssm_out.bias",
        }[kind]
        if kind == "A_log":
            values = -np.exp(values)[:, None]
        elif kind == "D":
            values = values[:, None]
        elif kind == "conv1d.weight":
            values = values[:, 0]
        elif kind == "norm.weight":
            values = values.reshape(groups, -1)
        converter.put(f"blk.{layer}.{theirs}", values)


def _write_mamba_sizes(
    writer: gguf.GGUFWriter, *, heads: int, head_dim: int, state: int, groups: int, kernel: int
) -> None:
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def _granite_hybrid(converter: Converter) -> None:
    config, writer = converter.config, converter.writer
    attends = [kind in ("attention", "full_attention") for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads if each else 0 for each in attends])
    has_experts = bool(config.num_local_experts)
    writer.add_feed_forward_length(config.intermediate_size if has_experts else config.shared_intermediate_size)
    if has_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    _write_mamba_sizes(
        writer,
        heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        state=config.mamba_d_state,
        groups=config.mamba_n_groups,
        kernel=config.mamba_d_conv,
    )
    for layer, has_attention in enumerate(attends):
        path = f"model.layers.{layer}"
        if has_attention:
            for kind, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
                rows = converter.take(f"{path}.self_attn.{kind}_proj.weight")
                converter.put(f"blk.{layer}.attn_{kind}.weight", interleaved(rows, heads))
        else:
            _mamba_layer(converter, layer, f"{path}.mamba", config.mamba_n_groups)
        gate, up = np.split(converter.take(f"{path}.shared_mlp.input_linear.weight"), 2)
        suffix = "_shexp" if has_experts else ""
        converter.put(f"blk.{layer}.ffn_gate{suffix}.weight", gate)
        converter.put(f"blk.{layer}.ffn_up{suffix}.weight", up)
        down = converter.take(f"{path}.shared_mlp.output_linear.weight")
        converter.put(f"blk.{layer}.ffn_down{suffix}.weight", down)
        if has_experts:
            gates, ups = np.split(converter.take(f"{path}.block_sparse_moe.input_linear.weight"), 2, axis=1)
            converter.put(f"blk.{layer}.ffn_gate_exps.weight", gates)
            converter.put(f"blk.{layer}.ffn_up_exps.weight", ups)
            downs = converter.take(f"{path}.block_sparse_moe.output_linear.weight")
            converter.put(f"blk.{layer}.ffn_down_exps.weight", downs)
            router = converter.take(f"{path}.block_sparse_moe.router.layer.weight")
            converter.put(f"blk.{layer}.ffn_gate_inp.weight", router)
        converter.put(f"blk.{layer}.ffn_norm.weight", converter.take(f"{path}.post_attention_layernorm.weight"))
    converter.put_others()


def _nemotron(converter: Converter) -> None:
    config, writer = converter.config, converter.writer
    kinds = config.layers_block_type
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_feed_forward_length([config.intermediate_size if kind == "mlp" else 0 for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    _write_mamba_sizes(
        writer,
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        state=config.ssm_state_size,
        groups=config.n_groups,
        kernel=config.conv_kernel,
    )
    if "moe" in kinds:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_count(1)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        converter.stack_experts({"up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"})
    names = {
        "attention": {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"},
        "mlp": {"up_proj": "ffn_up", "down_proj": "ffn_down"},
        "moe": {
            "gate": "ffn_gate_inp",
            "shared_experts.up_proj": "ffn_up_shexp",
            "shared_experts.down_proj": "ffn_down_shexp",
        },
    }
    names["full_attention"] = names["attention"]
    for layer, kind in enumerate(kinds):
        path = f"backbone.layers.{layer}"
        converter.put(f"blk.{layer}.attn_norm.weight", converter.take(f"{path}.norm.weight"))
        if kind in ("mamba", "linear_attention"):
            _mamba_layer(converter, layer, f"{path}.mixer", config.n_groups)
            continue
        correction = converter.state.pop(f"{path}.mixer.gate.e_score_correction_bias", None)
        if correction is not None:
            converter.put(f"blk.{layer}.exp_probs_b.bias", correction)
        for name in [name for name in converter.state if name.startswith(f"{path}.mixer.")]:
            stem, _, suffix = name.removeprefix(f"{path}.mixer.").rpartition(".")
            converter.put(f"blk.{layer}.{names[kind][stem]}.{suffix}", converter.take(name))
    converter.put("token_embd.weight", converter.take("backbone.embeddings.weight"))
    converter.put("output_norm.weight", converter.take("backbone.norm_f.weight"))
    converter.put_others()


# -- Short convolutions


def _lfm2(converter: Converter) -> None:
    config, writer = converter.config, converter.writer
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads if each else 0 for each in attends])
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    width = converter.state["model.layers.0.feed_forward.w1.weight"].shape[0]
    writer.add_feed_forward_length(width)
    if config.model_type == "lfm2_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        converter.stack_experts({"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"})
    for layer in range(converter.layers):
        path = f"model.layers.{layer}"
        if not attends[layer]:
            converter.put(f"blk.{layer}.shortconv.conv.weight", converter.take(f"{path}.conv.conv.weight")[:, 0])
        correction = converter.state.pop(f"{path}.feed_forward.expert_bias", None)
        if correction is not None:
            converter.put(f"blk.{layer}.exp_probs_b.bias", correction)
    converter.put_others()


# -- Gated delta nets


def _tiled(rows: np.ndarray, keys: int, values: int) -> np.ndarray:
    """Value heads in the order of their number beside their key head."""
    heads = rows.reshape(keys, values // keys, -1, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)


def _delta(converter: Converter) -> None:
    config, writer = converter.config, converter.writer
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    is_next = config.model_type == "qwen3_next"
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    partial = config.rope_parameters.get("partial_rotary_factor", 0.25)
    writer.add_rope_dimension_count(int(config.head_dim * partial))
    _write_mamba_sizes(
        writer, heads=values, head_dim=value_dim, state=key_dim, groups=keys, kernel=config.linear_conv_kernel_dim
    )
    writer.add_uint32(f"{writer.arch}.full_attention_interval", 3)
    if getattr(config, "num_experts", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        converter.stack_experts({"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"})
    else:
        writer.add_feed_forward_length(config.intermediate_size)

    def order(rows: np.ndarray) -> np.ndarray:
        return rows if is_next else _tiled(rows, keys, values)

    for layer in range(converter.layers):
        path, block = f"model.layers.{layer}.linear_attn", f"blk.{layer}"
        gate = converter.state.pop(f"model.layers.{layer}.mlp.shared_expert_gate.weight", None)
        if gate is not None:
            converter.put(f"{block}.ffn_gate_inp_shexp.weight", gate[0])
        norm = converter.take(f"model.layers.{layer}.post_attention_layernorm.weight")
        converter.put(f"{block}.post_attention_norm.weight", norm + 1)
        if f"{path}.A_log" not in converter.state:
            continue
        converter.put(f"{block}.ssm_a", -np.exp(order(converter.take(f"{path}.A_log"))))
        converter.put(f"{block}.ssm_dt.bias", order(converter.take(f"{path}.dt_bias")))
        channels = converter.take(f"{path}.conv1d.weight")[:, 0]
        first = 2 * keys * key_dim
        converter.put(f"{block}.ssm_conv1d.weight", np.concatenate([channels[:first], order(channels[first:])]))
        out = converter.take(f"{path}.out_proj.weight")
        converter.put(f"{block}.ssm_out.weight", order(out.T).T)
        converter.put(f"{block}.ssm_norm.weight", converter.take(f"{path}.norm.weight"))
        if is_next:
            per_key = values // keys * value_dim
            grouped = converter.take(f"{path}.in_proj_qkvz.weight").reshape(keys, -1, config.hidden_size)
            parts = np.split(grouped, np.cumsum([key_dim, key_dim, per_key]), axis=1)
            rows = [part.reshape(-1, config.hidden_size) for part in parts]
            converter.put(f"{block}.attn_qkv.weight", np.concatenate(rows[:3]))
            converter.put(f"{block}.attn_gate.weight", rows[3])
            converter.put(f"{block}.ssm_ba.weight", converter.take(f"{path}.in_proj_ba.weight"))
        else:
            qkv = converter.take(f"{path}.in_proj_qkv.weight")
            converter.put(f"{block}.attn_qkv.weight", np.concatenate([qkv[:first], order(qkv[first:])]))
            converter.put(f"{block}.attn_gate.weight", order(converter.take(f"{path}.in_proj_z.weight")))
            converter.put(f"{block}.ssm_alpha.weight", order(converter.take(f"{path}.in_proj_a.weight")))
            converter.put(f"{block}.ssm_beta.weight", order(converter.take(f"{path}.in_proj_b.weight")))
    converter.put_others(offset=lambda name: name.endswith("norm.weight"))


FORMS: dict[str, tuple[str, Writes]] = {
    "deepseek2": ("deepseek_v2", lambda converter: _deepseek(converter, splits=True)),
    "deepseek2+v3": ("deepseek_v3", lambda converter: _deepseek(converter, splits=True)),
    "deepseek2+older": ("deepseek_v2", lambda converter: _deepseek(converter, splits=False)),
    "gpt-oss": ("gpt_oss", lambda converter: _gpt_oss(converter, packs=False)),
    "gpt-oss+mxfp4": ("gpt_oss", lambda converter: _gpt_oss(converter, packs=True)),
    "granitehybrid": ("granitemoehybrid", _granite_hybrid),
    "nemotron_h": ("nemotron_h", _nemotron),
    "nemotron_h_moe": ("nemotron_h", _nemotron),
    "lfm2": ("lfm2", _lfm2),
    "lfm2moe": ("lfm2_moe", _lfm2),
    "qwen3next": ("qwen3_next", _delta),
    "qwen35": ("qwen3_5_text", _delta),
    "qwen35moe": ("qwen3_5_moe_text", _delta),
}
"""transformers' model_type and the conversion, by `general.architecture` and what is special behind a plus."""
