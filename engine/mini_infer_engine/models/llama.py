"""Llama 2 and 3: the plain decoder; biases where the config asks for them."""

from mini_infer_engine.layers.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """Grouped-query attention, SwiGLU, RMS norm before each block."""
