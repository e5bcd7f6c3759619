"""Time to the first token of a prompt with an image, and of one of text: dummy weights in the shapes of real models.

    python benchmarks/images.py --models gemma-3-4b,qwen2.5-vl-3b --out FILE

Of each model: a new image, which is encoded; a new prompt with an image whose embeddings are cached; a prompt whose
prefix is cached up to its last block; and text of as many tokens. Then the time between tokens of eight sequences, with
images and without.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common.report import log_line, make_parser, print_table, save, words

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import ImageInput, Request, SamplingParams
from mini_infer_engine.core_process.build import BuiltEngine, build_engine

_IDS = {"image_token_id": 151_655, "vision_start_token_id": 151_652, "vision_end_token_id": 151_653}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-3b": _IDS
    | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": True,
        "eos_token_id": 151_645,
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048, "depth": 32, "num_heads": 16},
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": "bfloat16",
        "image_token_index": 262_144,
        "mm_tokens_per_image": 256,
        "eos_token_id": 1,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "tiny": _IDS
    | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "image_token_id": 190,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 199,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "vision_config": {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "depth": 2,
            "num_heads": 2,
            "intermediate_size": 48,
        },
    },
}
_OUTPUT = 32
_SEQUENCES = 8


class Measurement:
    """One engine, and prompts for it that nothing has in common but what a figure is about."""

    def __init__(self, built: BuiltEngine, config: dict[str, Any], side: int) -> None:
        self.engine: Engine = built.engine
        self._is_gemma = "mm_tokens_per_image" in config
        self._placeholder = config.get("image_token_id", config.get("image_token_index"))
        self._side = side
        self._serial = 0

    def image(self, name: int) -> ImageInput:
        """An image of noise: 896 x 896 for Gemma, else `side` x `side` patches."""
        random = np.random.default_rng(name)
        side, patch = self._side, 3 * 2 * 14 * 14
        shape, tokens = ((1, 3, 896, 896), 256) if self._is_gemma else ((side * side, patch), side * side // 4)
        return ImageInput(
            offset=16,
            num_tokens=tokens,
            digest=name.to_bytes(32, "big"),
            grid=(1, side, side),
            shape=shape,
            pixels=random.standard_normal(shape, dtype=np.float32).tobytes(),
        )

    def request(self, image: ImageInput | None, tokens: int, prefix: int, output: int = 1) -> Request:
        """A prompt of 16 tokens, which `prefix` decides, an image or text of as many, and 16 new tokens."""
        self._serial += 1
        middle = [self._placeholder if image is not None else 3 + (prefix + place) % 150 for place in range(tokens)]
        ends = [[3 + (number * 7 + place) % 150 for place in range(16)] for number in (prefix, self._serial)]
        return Request(
            request_id=str(self._serial),
            prompt_token_ids=[*ends[0], *middle, *ends[1]],
            images=[] if image is None else [image],
            sampling=SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True),
        )

    def seconds(self, *requests: Request) -> float:
        """Runs requests together."""
        begin = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.finish_reason != "error", output.error
        return time.perf_counter() - begin

    def figures(self, rounds: int) -> dict[str, float]:
        """Milliseconds by name; the first round compiles and is not reported."""
        tokens = self.image(0).num_tokens
        found: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            image, prefix = self.image(1000 + number), 5000 + 10 * number
            values = {
                "TTFT, new image ms": self.seconds(self.request(image, tokens, prefix)),
                "TTFT, cached embeddings ms": self.seconds(self.request(image, tokens, prefix + 1)),
                "TTFT, cached prefix ms": self.seconds(self.request(image, tokens, prefix)),
                "TTFT, text ms": self.seconds(self.request(None, tokens, prefix)),
            }
            for name, pictured in (("ITL of 8 with images ms", image), ("ITL of 8 of text ms", None)):
                short, long = (
                    self.seconds(*(self.request(pictured, tokens, prefix + 2, output) for _ in range(_SEQUENCES)))
                    for output in (1, 1 + _OUTPUT)
                )
                values[name] = (long - short) / _OUTPUT
            for name, value in values.items():
                found.setdefault(name, []).append(1000 * value)
        return {"image tokens": tokens} | {name: median(values[1:]) for name, values in found.items()}


def main() -> None:
    """Measures model after model, and writes what there is after each."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=words, default=words("qwen2.5-vl-3b,gemma-3-4b"), metavar="NAME,...")
    parser.add_argument(
        "--side", type=int, default=72, help="patches of Qwen's images in height and width (72: 1,296 tokens)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
    settings |= {"max_num_seqs": 16}
    if options.smoke:
        options.models, options.side, options.rounds = ["tiny"], 8, 1
        settings |= {"device": "cpu", "kv_cache_memory": 1 << 24, "mm_encoder_cache_tokens": 64}
    results: dict[str, dict[str, float]] = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as root:
            (Path(root) / "config.json").write_text(json.dumps(CONFIGS[name]))
            begin = time.perf_counter()
            built = build_engine(EngineSettings(model=root, **settings), record_events=False)
            assert isinstance(built, BuiltEngine)
            log_line(f"{name} started in {time.perf_counter() - begin:.1f} s: {built.model.device_memory}")
            results[name] = Measurement(built, CONFIGS[name], options.side).figures(options.rounds)
            del built
        save(options.out, {"results": results})
    print_table(
        ["", *results], [[key, *(each[key] for each in results.values())] for key in next(iter(results.values()))]
    )


if __name__ == "__main__":
    main()
