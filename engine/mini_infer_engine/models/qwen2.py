"""Qwen2 and Qwen2.5: Llama's decoder with biases on q, k and v, and sliding windows where the config has them."""

from mini_infer_engine.layers.decoder import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """Llama's decoder; the biases are `ModelConfig.qkv_bias`."""
