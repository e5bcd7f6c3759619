"""Mistral: Llama's decoder with a sliding window, which the config carries for each layer."""

from mini_infer_engine.layers.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    """Llama's decoder; the windows are `ModelConfig.sliding_windows`."""
