"""Qwen3: Qwen2's decoder without its biases, and each head of q and k normalised before the rotation."""

from mini_infer_engine.layers.decoder import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """Llama's decoder with q and k norms."""

    has_qk_norm = True
