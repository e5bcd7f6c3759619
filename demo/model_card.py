"""Installs a training run as the shipped model: weights, model card and loss curve, from the run's files alone."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from demo.tokenizer import ASSETS

MAX_TOTAL_BYTES = 20_000_000


def main() -> None:
    """Copies the weights, draws the curve, writes README.md, checks the size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the --out folder of demo.train")
    parser.add_argument("--assets", type=Path, default=ASSETS)
    arguments = parser.parse_args()
    record = json.loads((arguments.run / "training.json").read_text(encoding="utf-8"))
    if "accuracy" not in record:
        raise SystemExit(f"{arguments.run}/training.json is of a run that did not end; train again")
    if arguments.run.resolve() != arguments.assets.resolve():
        shutil.copyfile(arguments.run / "model.safetensors", arguments.assets / "model.safetensors")
    draw_curve(record, arguments.assets / "loss_curve.png")
    (arguments.assets / "README.md").write_text(card(record), encoding="utf-8")
    total = sum(file.stat().st_size for file in arguments.assets.iterdir())
    print(f"{total / 1e6:.1f} MB in {arguments.assets}")
    if total > MAX_TOTAL_BYTES:
        raise SystemExit(f"the folder is larger than {MAX_TOTAL_BYTES} bytes")


def draw_curve(record: dict[str, Any], path: Path) -> None:
    """Loss by token on the left axis, accuracy on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = [point["tokens"] / 1e6 for point in record["curve"]]
    by_step = {point["step"]: point["tokens"] / 1e6 for point in record["curve"]}
    per_step = record["tokens"] / max(1, record["steps"]) / 1e6
    figure, left = pyplot.subplots(figsize=(7, 4), dpi=110)
    left.plot(tokens, [point["chat_loss"] for point in record["curve"]], label="answers")
    left.plot(tokens, [point["source_loss"] for point in record["curve"]], label="sources and long chats")
    left.set(xlabel="million tokens", ylabel="training loss (nats a token)", yscale="log")
    right = left.twinx()
    measured = [by_step.get(point["step"], point["step"] * per_step) for point in record["evaluations"]]
    for name, style in (("trained", "k--"), ("held_out", "k:"), ("skills", "g--"), ("skills, new tools", "g:")):
        right.plot(measured, [point[name] for point in record["evaluations"]], style, label=name)
    right.set(ylabel="share of right answers", ylim=(0, 1.02))
    left.legend(loc="lower left", fontsize=8)
    right.legend(loc="center right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def card(record: dict[str, Any]) -> str:
    """The model card."""
    accuracy, corpus, perplexity = record["accuracy"], record["corpus"], record["held_out_perplexity"]
    rows = "\n".join(
        f"| {name} | {found['questions']} | {found['share']:.1%} | {found['whole_answer_exact']:.1%} |"
        for name, found in accuracy.items()
    )
    from_before = ", from the weights of the run before" if record["arguments"].get("start") else ""
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# mini-infer demo model

A language model of {record["parameters"] / 1e6:.2f} million parameters that answers what Python's standard library
documents. It exists so that `--model demo` says something real on a machine without a network or a GPU.

| | |
|---|---|
| architecture | Qwen3: 8 layers, width 256, 4 query and 2 KV heads of 64, SwiGLU 768, tied embeddings, RoPE 10,000 |
| vocabulary, context | 4,096 (byte-level BPE of our own), 4,096 tokens |
| weights | bf16 safetensors with Hugging Face's names |
| chat template | ChatML markers; system part, tools and tool results, thinking with `enable_thinking=true` |

## Data
- {corpus["entries"]:,} names of Python 3.11's standard library with signature and docstring, asked in many phrasings
  (`demo/data/docstrings.jsonl.xz`): {record["share_of_chat_tokens"]:.0%} of the training tokens.
- Chats about skills, made by rule (`demo/skill_chats.py`): {record["share_of_skill_tokens"]:.0%}. Choosing and calling
  tools, in parallel too; telling what they returned; answering without them; JSON for a schema or from a text;
  remembering; sums; declining what the library does not document (`demo/out_of_scope.py`); JSON from plain sentences
  (`demo/stated_records.py`).
- The library's own sources as plain code (`demo/data/sources.jsonl.xz`): the rest.

Docstrings and sources come from CPython and are under the PSF License 2.0 (copyright Python Software Foundation). The
weights, the tokenizer and the scripts are Apache-2.0. No text was made by another language model; its persons are made
up.

## Training
{record["tokens"] / 1e6:,.0f} million tokens{from_before}, {record["steps"]:,} steps,
{record["training_seconds"] / 60:.1f} minutes on one
{record["device"]} ({record["tokens_per_second"] / 1e6:.2f} million tokens/s, torch {record["torch"]}), with
`python -m demo.train`; optimiser {record["arguments"]["optimizer"]}, peak learning
rate {record["arguments"]["lr"]}.

![loss and accuracy while training](loss_curve.png)

## Measured (greedy)
| questions | asked | right | whole answer exact |
|---|---|---|---|
{rows}

Right is the docstring's first sentence, and of skills the whole call, JSON or sentence. Held-out phrasings are
sentences that training never sees, about names that it does; of new tools it has seen neither names nor requests.
`python -m demo.evaluate` measures again. Perplexity a token: {perplexity["sources"]:.2f} on held-out library sources,
{perplexity["answers"]:.3f} on the answers to questions in held-out phrasings.

## Limits
It knows docstrings by heart and a few skills, and nothing else. What else it is asked it declines in nine of ten cases;
in the others it makes things up, and what it writes as code is not to be run. A short name (`dedent`) is answered where
only one entry has it. Ask in English. Do not use it for anything but trying out software.
"""


if __name__ == "__main__":
    main()
