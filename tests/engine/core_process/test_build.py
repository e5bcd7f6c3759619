import json
import subprocess
import sys
from pathlib import Path

import pytest

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError
from tests.engine.server.dry_server import environment

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rope_theta": 10_000,
    "tie_word_embeddings": True,
    "eos_token_id": 299,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_runner_is_built_from_a_model_folder(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, kv_cache_memory=2**22, max_num_seqs=4)
    assert (llm.model_info.max_model_len, llm.model_info.vocab_size) == (256, 300)
    prompts = [{"prompt_token_ids": list(range(1, length))} for length in (3, 20, 40, 200, 33)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]
    assert all(len(output.outputs[0].token_ids) == 20 for output in together)
    assert alone[3].num_cached_tokens == 192


def test_the_error_names_what_a_model_folder_lacks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ModelError, match="safetensors"):
        LLM(str(folder), skip_tokenizer_init=True)
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        LLM(str(tmp_path_factory.mktemp("empty")), skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        LLM(str(folder), load_format="dummy")


def test_dry_run_and_http_process_never_import_torch() -> None:
    script = (
        "import sys; from mini_infer_engine import LLM; from mini_infer_engine.server import cli, serve\n"
        "from mini_infer_engine.api import app; from mini_infer_engine.core_process import loop\n"
        "LLM('dry', max_model_len=64).generate('x', use_tqdm=False); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), timeout=60, check=False)
    assert done.returncode == 0
