"""A GGUF file with its blocks packed, and expanded to bf16: bytes of weights, and times of decode steps and prompts.

    python benchmarks/gguf_blocks.py --layers 32 --files Q4_K_M,Q4_0,Q8_0 --out FILE

The files have random blocks in the shape of Mistral 7B, or of its first layers. Q4_K_M has half of the value and down
projections, and the output layer, in Q6_K, as llama.cpp writes it. Forms are measured one after another in one process.
"""

import gc
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np
import torch
from common.report import integers, log_line, make_parser, print_table, save, words

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core_process.build import build_engine
from mini_infer_engine.gguf.folder import model_folder

_Q = gguf.GGMLQuantizationType
_SCALE_PLACES = {_Q.Q4_0: (0,), _Q.Q8_0: (0,), _Q.Q4_K: (0, 2), _Q.Q6_K: (208,)}
"""Bytes of a block at which numbers of 16 bits stand."""
_SIZES = {"hidden": 4096, "width": 14_336, "heads": 32, "kv_heads": 8, "vocabulary": 32_000}
_SMOKE_SIZES = {"hidden": 256, "width": 512, "heads": 4, "kv_heads": 2, "vocabulary": 512}
_PROMPTS = (512, 2048)
_STEPS, _TRIES = 40, 5


def blocks(rows: int, columns: int, kind: _Q, dice: np.random.Generator) -> np.ndarray:
    """Returns random blocks with small scales."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    content = dice.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for place in _SCALE_PLACES[kind]:
        content[:, place : place + 2] = np.array([1e-4 if size > 34 else 5e-4], np.float16).view(np.uint8)
    return content.reshape(rows, -1)


def write(path: Path, form: str, layers: int, sizes: dict[str, int]) -> None:
    """Writes a file of Llama's architecture."""
    hidden, width, vocabulary = sizes["hidden"], sizes["width"], sizes["vocabulary"]
    keys = hidden // sizes["heads"] * sizes["kv_heads"]
    usual, better = (_Q.Q4_K, _Q.Q6_K) if form == "Q4_K_M" else (_Q[form], _Q[form])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32_768)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    tokens = ["<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "Ċ"]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(1)
    dice = np.random.default_rng(0)
    shapes = {
        "attn_q": (hidden, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (width, hidden),
        "ffn_up": (width, hidden),
        "ffn_down": (hidden, width),
    }
    tensors: list[tuple[str, int, int, _Q]] = [("token_embd", vocabulary, hidden, usual)]
    tensors.append(("output", vocabulary, hidden, better))
    for layer in range(layers):
        for name, (rows, columns) in shapes.items():
            kind = better if name in ("attn_v", "ffn_down") and layer % 2 else usual
            tensors.append((f"blk.{layer}.{name}", rows, columns, kind))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for name, rows, columns, kind in tensors:
        writer.add_tensor(f"{name}.weight", blocks(rows, columns, kind, dice), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(engine: Engine, vocabulary: int, batches: list[int], prompts: tuple[int, ...]) -> dict[str, float]:
    """Returns milliseconds between tokens by batch, and to the first token by length."""
    dice, found = random.Random(0), {}

    def add(name: str, length: int, tokens: int) -> None:
        prompt = [dice.randrange(vocabulary) for _ in range(length)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling))

    def run() -> None:
        while engine.has_work:
            engine.step()

    for batch in batches:
        for row in range(batch):
            add(f"{batch}-{row}", 16, _STEPS + 20)
        for _ in range(12):
            engine.step()
        begin = time.perf_counter()
        for _ in range(_STEPS):
            engine.step()
        found[f"itl ms {batch}"] = (time.perf_counter() - begin) / _STEPS * 1e3
        run()
    for length in prompts:
        times = []
        for attempt in range(_TRIES):
            add(f"p{length}-{attempt}", length, 1)
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        found[f"ttft ms {length}"] = median(times[1:]) * 1e3
    return found


def main() -> int:
    """Measures, prints and saves. Returns the exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--files", type=words, default=words("Q4_K_M,Q4_0,Q8_0"))
    parser.add_argument("--batches", type=integers, default=integers("1,8,32"))
    options = parser.parse_args()
    sizes, prompts = (_SMOKE_SIZES, (32,)) if options.smoke else (_SIZES, _PROMPTS)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 4096, "kv_cache_memory": 1 << 32}
    if options.smoke:
        settings |= {"device": "cpu", "kv_cache_memory": 1 << 22, "max_model_len": 256}
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        for form in options.files:
            path = Path(scratch) / f"{form}.gguf"
            write(path, form, 2 if options.smoke else options.layers, sizes)
            size_gb = path.stat().st_size / 1e9
            log_line(f"{form}: {size_gb:.2f} GB")
            folder = str(model_folder(path))
            for choice in ("packed", "expanded"):
                begin = time.perf_counter()
                engine_settings = EngineSettings(model=folder, gguf_blocks=choice, **settings)
                built = build_engine(engine_settings, record_events=False)
                start_s = time.perf_counter() - begin
                own = {"file GB": size_gb, "weights GB": built.model.device_memory["weights"] / 1e9, "start s": start_s}
                figures[f"{form}, {choice}"] = own | measure(
                    built.engine, sizes["vocabulary"], options.batches, prompts
                )
                log_line(f"{form}, {choice}: {figures[f'{form}, {choice}']}")
                del built
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                if options.out:
                    save(options.out, {"figures": figures})
            path.unlink()
    names = list(next(iter(figures.values())))
    print_table(["file", *names], [[label, *(own[name] for name in names)] for label, own in figures.items()])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
