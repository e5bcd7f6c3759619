"""Architecture names to the classes that build them; a new model is one file and one line here."""

from mini_infer_engine.layers.decoder import DecoderModel
from mini_infer_engine.models.llama import LlamaForCausalLM
from mini_infer_engine.models.mistral import MistralForCausalLM
from mini_infer_engine.models.qwen2 import Qwen2ForCausalLM
from mini_infer_engine.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[DecoderModel]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
