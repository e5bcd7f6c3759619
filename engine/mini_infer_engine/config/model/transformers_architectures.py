"""Lists the architectures that are tested to run through transformers, and those that are refused. Knows neither torch
nor transformers.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TransformersArchitecture:
    """An architecture whose greedy text equals that of transformers' `generate` on a CPU."""

    model_type: str
    tensor_parallel: bool = True
    """True if transformers has a plan by which ranks share the model."""
    gpu: Literal["graphs", "eager"] = "graphs"
    """The way its text was compared on a GPU: in CUDA graphs, or with `--enforce-eager`, which it needs. Graphs of
    models with experts are of bf16 passes: transformers computes their fp32 products in a loop on the host.
    """


THROUGH_TRANSFORMERS: dict[str, TransformersArchitecture] = {
    "AfmoeForCausalLM": TransformersArchitecture("afmoe"),
    "ApertusForCausalLM": TransformersArchitecture("apertus"),
    "ArceeForCausalLM": TransformersArchitecture("arcee"),
    "BioGptForCausalLM": TransformersArchitecture("biogpt", tensor_parallel=False),
    "BitNetForCausalLM": TransformersArchitecture("bitnet", tensor_parallel=False),
    "BloomForCausalLM": TransformersArchitecture("bloom", tensor_parallel=False),
    "CodeGenForCausalLM": TransformersArchitecture("codegen", tensor_parallel=False),
    "CohereForCausalLM": TransformersArchitecture("cohere"),
    "Cohere2ForCausalLM": TransformersArchitecture("cohere2"),
    "Cohere2MoeForCausalLM": TransformersArchitecture("cohere2_moe"),
    "CTRLLMHeadModel": TransformersArchitecture("ctrl", tensor_parallel=False),
    "CwmForCausalLM": TransformersArchitecture("cwm"),
    "DiffLlamaForCausalLM": TransformersArchitecture("diffllama", tensor_parallel=False),
    "Dots1ForCausalLM": TransformersArchitecture("dots1"),
    "Ernie4_5ForCausalLM": TransformersArchitecture("ernie4_5"),
    "Ernie4_5_MoeForCausalLM": TransformersArchitecture("ernie4_5_moe"),
    "Exaone4ForCausalLM": TransformersArchitecture("exaone4"),
    "ExaoneMoeForCausalLM": TransformersArchitecture("exaone_moe"),
    "FalconForCausalLM": TransformersArchitecture("falcon", tensor_parallel=False, gpu="eager"),
    "FlexOlmoForCausalLM": TransformersArchitecture("flex_olmo"),
    "GemmaForCausalLM": TransformersArchitecture("gemma"),
    "GlmForCausalLM": TransformersArchitecture("glm"),
    "Glm4ForCausalLM": TransformersArchitecture("glm4"),
    "Glm4MoeForCausalLM": TransformersArchitecture("glm4_moe"),
    "GPT2LMHeadModel": TransformersArchitecture("gpt2", tensor_parallel=False),
    "GPTBigCodeForCausalLM": TransformersArchitecture("gpt_bigcode", tensor_parallel=False),
    "GPTJForCausalLM": TransformersArchitecture("gptj", tensor_parallel=False),
    "GPTNeoForCausalLM": TransformersArchitecture("gpt_neo", tensor_parallel=False),
    "GPTNeoXForCausalLM": TransformersArchitecture("gpt_neox"),
    "GraniteSWAForCausalLM": TransformersArchitecture("granite_swa"),
    "GraniteMoeForCausalLM": TransformersArchitecture("granitemoe", tensor_parallel=False),
    "GraniteMoeSWAForCausalLM": TransformersArchitecture("granitemoe_swa"),
    "GraniteMoeSharedForCausalLM": TransformersArchitecture("granitemoeshared", tensor_parallel=False),
    "HeliumForCausalLM": TransformersArchitecture("helium"),
    "HrmTextForCausalLM": TransformersArchitecture("hrm_text"),
    "HunYuanDenseV1ForCausalLM": TransformersArchitecture("hunyuan_v1_dense", tensor_parallel=False),
    "HunYuanMoEV1ForCausalLM": TransformersArchitecture("hunyuan_v1_moe"),
    "HYV3ForCausalLM": TransformersArchitecture("hy_v3"),
    "HyperCLOVAXForCausalLM": TransformersArchitecture("hyperclovax"),
    "Jais2ForCausalLM": TransformersArchitecture("jais2"),
    "LagunaForCausalLM": TransformersArchitecture("laguna"),
    "MellumForCausalLM": TransformersArchitecture("mellum"),
    "MiniMaxM2ForCausalLM": TransformersArchitecture("minimax_m2"),
    "MinistralForCausalLM": TransformersArchitecture("ministral"),
    "Ministral3ForCausalLM": TransformersArchitecture("ministral3"),
    "ModernBertDecoderForCausalLM": TransformersArchitecture("modernbert-decoder", tensor_parallel=False),
    "MptForCausalLM": TransformersArchitecture("mpt", tensor_parallel=False),
    "NanoChatForCausalLM": TransformersArchitecture("nanochat"),
    "NemotronForCausalLM": TransformersArchitecture("nemotron", tensor_parallel=False),
    "OlmoForCausalLM": TransformersArchitecture("olmo"),
    "Olmo3ForCausalLM": TransformersArchitecture("olmo3"),
    "OlmoeForCausalLM": TransformersArchitecture("olmoe"),
    "OPTForCausalLM": TransformersArchitecture("opt", tensor_parallel=False),
    "PersimmonForCausalLM": TransformersArchitecture("persimmon", tensor_parallel=False),
    "PhiForCausalLM": TransformersArchitecture("phi"),
    "PhimoeForCausalLM": TransformersArchitecture("phimoe", gpu="eager"),
    "Qwen2MoeForCausalLM": TransformersArchitecture("qwen2_moe"),
    "SeedOssForCausalLM": TransformersArchitecture("seed_oss"),
    "SolarOpenForCausalLM": TransformersArchitecture("solar_open"),
    "StableLmForCausalLM": TransformersArchitecture("stablelm", tensor_parallel=False),
    "Starcoder2ForCausalLM": TransformersArchitecture("starcoder2"),
    "VaultGemmaForCausalLM": TransformersArchitecture("vaultgemma"),
    "XGLMForCausalLM": TransformersArchitecture("xglm", tensor_parallel=False),
}
"""By the name in `architectures` of config.json; `--model-impl transformers` runs those with a file of ours, too."""
_INTERFACE = "its attention does not go through transformers' interface"
_STATE = "its layers keep a state that is no attention"
REFUSED = {
    "OpenAIGPTLMHeadModel": _INTERFACE,
    "MambaForCausalLM": _STATE,
    "RwkvForCausalLM": "it keeps a recurrent state",
    "OlmoHybridForCausalLM": _STATE,
    "MiniCPM3ForCausalLM": "latent attention, whose keys and values differ in width",
    "DbrxForCausalLM": "its experts are chosen by values that the host reads",
    "DogeForCausalLM": "a mask of its own",
    "Llama4ForCausalLM": "attention in chunks",
    "BertLMHeadModel": "an encoder: tokens see what comes after them",
}
"""Architectures that are refused, with the reason."""
