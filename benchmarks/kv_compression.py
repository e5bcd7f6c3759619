"""Ways to have fewer bytes of keys and values: what each does to answers, to memory and to the time of a token.

    python benchmarks/kv_compression.py --model smollm2 --context 800 --out FILE --picture FILE.png
    python benchmarks/kv_compression.py --model smollm2 --kvpress --out FILE    # with kvpress and accelerate

Contexts are synthetic: sentences that are drawn, with facts among them (needles), and text of Python's documentation.
A needle is asked for by the first words of its sentence, at the end of the context, and is found if its number comes
next; "one" has a context for each needle, "eight" a context with eight of them. Text is scored by tokens that are
forced (structured output of token ids): their perplexity, how often the likeliest token is that of the full cache, and
the KL from the full cache's distribution, over tokens that are among the 20 likeliest of both, and all others as one. A
budget is a share of each prompt. Bytes are those of one sequence of the context's length with the bounds of its pages:
what it takes, and what a decode reads of it, on average over layers. Two stages (RocketKV, arXiv 2502.14051) are a
policy, and a selection among what it keeps: of pages, as the engine selects them, or by RocketKV's own approximation
("hybrid"), a reference that this script has. With `--kvpress`, NVIDIA's kvpress answers the same questions through
transformers, for what it has.
"""

import argparse
import gc
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, get_args

from common.report import integers, log_line, make_parser, print_table, save, words
from common.rocketkv_reference import hybrid_decodes

from mini_infer_contract.engine_options import KVPolicyName
from mini_infer_engine import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from mini_infer_engine.config.options.kv_selection import DENSE_LAYERS
from mini_infer_engine.config.options.settings import EngineSettings

TOPICS = ("compound", "specialnames")
"""Chapters of Python's own documentation, at which the two texts begin."""
NEEDLES = (
    "The locker of Anna opens with the code",
    "The old piano was sold for a price of",
    "The library on the coast owns maps, in all",
    "The mountain hut lies at a height in feet of",
    "The telephone extension of Doctor Weber is",
    "Children who visited the museum last year:",
    "The ship Aurora carried barrels of oil, namely",
    "The lottery ticket that won has the number",
)
_WORDS = (
    ("old", "quiet", "tall", "young", "busy", "small", "heavy", "clever", "tired", "proud"),
    ("farmer", "baker", "sailor", "teacher", "painter", "gardener", "driver", "writer", "singer", "judge"),
    ("watched", "passed", "helped", "followed", "called", "met", "thanked", "found", "remembered", "visited"),
    ("river", "market", "bridge", "station", "garden", "harbour", "tower", "field", "mill", "square"),
)
_LIKELIEST = 20
_FORCED = 48
_DIGITS = 4
_HYBRID_PAGE, _HYBRID_ELEMENTS = 4, 4
"""Tokens of a page of RocketKV's approximation, which reads one of so many elements of a key."""
_TIER_PAGES = 1.5
"""Contexts that fit the device's pool where blocks are to come back from a tier."""


@dataclass(frozen=True)
class Method:
    """A way to store or to choose keys and values."""

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine. Methods with equal ones share an engine, and its prefix cache."""
    policy: str | None = None
    share: float = 1.0
    """Share of a prompt's tokens that is retained."""
    selected_tokens: int | None = None
    """Tokens to which a decode attends; None means all that are retained."""
    is_hybrid: bool = False
    """True if they are selected as RocketKV does."""
    kept: Callable[["Sizes"], float] = lambda sizes: sizes.context * sizes.token_bytes
    """Bytes of keys and values of one sequence."""

    def bounds(self, sizes: "Sizes") -> float:
        """Returns the bytes of the bounds of one sequence's pages, in the layers that select."""
        page_size = _HYBRID_PAGE if self.is_hybrid else sizes.page_size
        selects = 0 if self.selected_tokens is None else 1 - DENSE_LAYERS / sizes.num_layers
        return selects * self.kept(sizes) / page_size  # two keys a page: the bytes of one token

    def read(self, sizes: "Sizes") -> float:
        """Returns the bytes that a decode reads of one sequence."""
        if self.selected_tokens is None:
            return self.kept(sizes)
        dense = DENSE_LAYERS / sizes.num_layers
        bounds = self.bounds(sizes) / (2 * _HYBRID_ELEMENTS if self.is_hybrid else 1)  # one bound of each element
        selected = min(self.selected_tokens * sizes.token_bytes, self.kept(sizes))
        return dense * self.kept(sizes) + (1 - dense) * selected + bounds


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and its cache, from which bytes follow."""

    context: int
    token_bytes: int
    """Bytes of one token, as the engine stores it."""
    tier_token_bytes: float
    """Bytes of one token in main memory."""
    page_size: int
    num_layers: int


@dataclass(frozen=True)
class Work:
    """Token ids of what every method is asked."""

    one: list[tuple[list[int], str]]
    """Contexts with one needle and its question, and the number."""
    eight: list[tuple[list[int], str]]
    """Contexts with all needles, and each of the questions."""
    texts: list[tuple[list[int], list[int]]]
    """Contexts, and the tokens that are forced."""


def methods_of(args: argparse.Namespace) -> list[Method]:
    """Returns the methods that were chosen and whose options this engine has."""
    found = [
        Method("full"),
        Method("int8 pages", {"kv_cache_dtype": "int8"}),
        Method("fp8 pages", {"kv_cache_dtype": "fp8"}),
        Method("int4 tiers", {"kv_tier_dtype": "int4"}, kept=lambda sizes: sizes.context * sizes.tier_token_bytes),
    ]
    sums = {"kv_policy": "h2o", "kv_budget": args.context + 256}  # memory for them, which h2o needs; nothing is evicted
    for policy in ("streaming-llm", "snapkv", "snapkv-wide", "h2o"):
        for divisor in args.budgets:
            name, options = f"{policy} 1/{divisor}", sums if policy == "h2o" else {}
            found.append(Method(name, options, policy=policy, share=1 / divisor, kept=_kept_share(divisor)))
    selecting = {"kv_selection": "quest", "kv_selection_budget": args.context // args.page_size * args.page_size}
    for divisor in args.budgets:
        name = f"quest 1/{divisor} is read"
        found.append(Method(name, selecting, selected_tokens=_selected(divisor, args)))
    for divisor in args.kept:
        for stage in args.stages:
            selected = _selected(divisor * stage, args)
            if selected > args.context / (divisor * stage):  # as much as another row reads
                continue
            for kind in ("quest", "hybrid"):
                name = f"snapkv-wide 1/{divisor} + {kind} 1/{stage}"
                found.append(
                    Method(
                        name,
                        selecting,
                        policy="snapkv-wide",
                        share=1 / divisor,
                        selected_tokens=selected,
                        is_hybrid=kind == "hybrid",
                        kept=_kept_share(divisor),
                    )
                )
    options = set(EngineSettings.__struct_fields__)
    return [
        method
        for method in found
        if options.issuperset(method.engine)
        and (method.policy is None or method.policy in get_args(KVPolicyName))
        and any(method.name.startswith(chosen) for chosen in args.methods)
    ]


def _selected(divisor: int, args: argparse.Namespace) -> int:
    """Returns a share of the context in whole pages, of which page selection reads four at least."""
    return max(4 * args.page_size, args.context // divisor // args.page_size * args.page_size)


def _kept_share(divisor: int) -> Callable[[Sizes], float]:
    return lambda sizes: sizes.context * sizes.token_bytes / divisor


def main() -> None:
    """Measures, prints a table, and writes a JSON file and a picture."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=2048, help="tokens of every context")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--budgets", type=integers, default=[2, 4, 8], metavar="N,...", help="parts of a prompt: 1/N")
    parser.add_argument(
        "--kept", type=integers, default=[2, 4, 8], metavar="N,...", help="of two stages: the first's 1/N"
    )
    parser.add_argument("--stages", type=integers, default=[2, 4], metavar="N,...", help="of what is kept 1/N is read")
    parser.add_argument("--methods", type=words, default=[""], metavar="NAME,...", help="beginnings of their names")
    parser.add_argument("--one", type=int, default=len(NEEDLES), help="contexts with one needle")
    parser.add_argument("--draws", type=int, default=1, help="contexts with eight needles")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG of retrieval and KL over bytes")
    parser.add_argument("--kvpress", action="store_true", help="kvpress beside it; only SmolLM2")
    args = parser.parse_args()
    if args.smoke:
        vars(args).update({"model": "demo", "context": 256, "budgets": [2], "kept": [2], "stages": [2], "one": 1})
    result: dict[str, Any] = {"model": args.model, "context": args.context, "methods": {}}
    methods, full = methods_of(args), None
    work: Work | None = None
    for options in unique([method.engine for method in methods]):
        engine = open_engine(args, options)
        work = work or make_work(engine.get_tokenizer(), args)
        fill(engine, work)
        for method in (method for method in methods if method.engine == options):
            log_line(method.name)
            with selecting(engine, method):
                found = measure(engine, method, work, full, args)
            logprobs = found.pop("logprobs")
            full = full or logprobs
            result["methods"][method.name] = found
            save(args.out, result)
        del engine
        gc.collect()
    if args.kvpress and work is not None:
        from common.kvpress_reference import answers  # it needs kvpress

        result["kvpress"] = {}
        for name, found_answers in answers([prompt for prompt, _ in work.eight], args.budgets, _DIGITS + 2):
            numbers = [number for _, number in work.eight]
            result["kvpress"][name] = {"eight": share_found(found_answers, numbers)}
            log_line(f"kvpress {name}: {result['kvpress'][name]}")
            save(args.out, result)
    show(result)
    if args.picture is not None:
        plot(result, args.picture)


def unique(options: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each of the options once, in their order."""
    for place, one in enumerate(options):
        if one not in options[:place]:
            yield one


def open_engine(args: argparse.Namespace, options: dict[str, Any]) -> LLM:
    """Starts an engine. With a tier, its pool has room for little more than one context, so that blocks leave it."""
    common = {"device": args.device, "dtype": args.dtype, "page_size": args.page_size, "max_num_seqs": len(NEEDLES)}
    length = args.context + 256
    tokens = (args.one + args.draws + len(TOPICS)) * length + len(NEEDLES) * 256
    if "kv_tier_dtype" in options:
        probe = LLM(args.model, max_model_len=length, kv_cache_memory=400_000_000, **common)
        token_bytes = probe._engine._runner.pool.spec.page_bytes // args.page_size
        del probe
        gc.collect()
        memory = {"kv_cache_memory": int(_TIER_PAGES * length * token_bytes), "kv_host_memory": tokens * token_bytes}
    else:
        memory = {"kv_cache_memory": 1_500_000_000}
    return LLM(args.model, max_model_len=length, **common, **memory, **options)


def selecting(engine: LLM, method: Method) -> AbstractContextManager[None]:
    """Has an engine's decodes select as a method does, while this is entered."""
    if method.selected_tokens is None:
        return nullcontext()
    pool = engine._engine._runner.pool
    pool.bounds.budget_pages = method.selected_tokens // pool.spec.page_size
    return hybrid_decodes(_HYBRID_PAGE, _HYBRID_ELEMENTS) if method.is_hybrid else nullcontext()


def make_work(tokenizer: Any, args: argparse.Namespace) -> Work:
    """Draws contexts and questions; the same for every method."""
    draw = random.Random(36)
    numbers = [str(draw.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)) for _ in NEEDLES]

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def haystack(places: Sequence[int]) -> list[int]:
        """A context whose needles stand at equal distances."""
        sentences = [ids(f"{NEEDLES[place]} {numbers[place]}. ") for place in places]
        room = args.context - sum(map(len, sentences)) - 40
        parts: list[list[int]] = []
        while sum(map(len, parts)) < room:
            adjective, noun, verb, where = (draw.choice(group) for group in _WORDS)
            parts.append(ids(f"The {adjective} {noun} {verb} the {draw.choice(_WORDS[1])} near the {where}. "))
        for number, sentence in reversed(list(enumerate(sentences))):
            parts.insert((2 * number + 1) * len(parts) // (2 * len(sentences)), sentence)
        return [token for part in parts for token in part]

    def question(place: int) -> list[int]:
        return ids(f"\n\nWhat was said above, again: {NEEDLES[place]}")

    shared = haystack(range(len(NEEDLES)))
    eight = [(shared + question(place), numbers[place]) for place in range(len(NEEDLES))]
    one = [(haystack([place]) + question(place), numbers[place]) for place in range(args.one)]
    texts = []
    for name in TOPICS:
        later = [topics[each] for each in sorted(topics) if each >= name]
        tokens = ids("\n\n".join(later)[: 8 * (args.context + _FORCED)])
        texts.append((tokens[: args.context], tokens[args.context : args.context + _FORCED]))
    for _ in range(args.draws - 1):
        numbers = [str(draw.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)) for _ in NEEDLES]
        shared = haystack(range(len(NEEDLES)))
        eight += [(shared + question(place), numbers[place]) for place in range(len(NEEDLES))]
    return Work(one, eight, texts)


def fill(engine: LLM, work: Work) -> None:
    """Computes every context once, so that methods hit it, and lets a tier have it."""
    for prompt in [
        *(prompt for prompt, _ in work.eight[:: len(NEEDLES)]),
        *(prompt for prompt, _ in work.one),
        *(prompt for prompt, _ in work.texts),
    ]:
        run(engine, [prompt], [SamplingParams(temperature=0, max_tokens=1)])
        while engine._engine.write_behind():
            engine._engine._tiers.wait(1.0)


def run(engine: LLM, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[RequestOutput]:
    """Outputs of prompts that run together."""
    return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def measure(
    engine: LLM, method: Method, work: Work, full: list[Any] | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Quality, bytes and time of one method. Questions run together, texts one after another."""

    def sampling(prompt: list[int], **fields: Any) -> SamplingParams:
        if method.policy is not None:
            fields |= {"kv_policy": method.policy, "kv_budget": int(len(prompt) * method.share)}
        return SamplingParams(temperature=0, **fields)

    found: dict[str, Any] = {}
    cached = []
    for name, asked in (("eight", work.eight), ("one", work.one)):
        texts = []
        together = len(NEEDLES) if name == "eight" else 1
        for some in (asked[place : place + together] for place in range(0, len(asked), together)):
            prompts = [prompt for prompt, _ in some]
            outputs = run(engine, prompts, [sampling(prompt, max_tokens=_DIGITS + 2) for prompt in prompts])
            texts += [output.outputs[0].text for output in outputs]
            cached += [output.cached_tokens_details for output in outputs]
        found[name] = share_found(texts, [number for _, number in asked])
        found[f"answers to {name}"] = texts
    logprobs, seconds = [], []
    for prompt, forced in work.texts:
        grammar = StructuredOutputsParams(grammar="start: " + " ".join(f"<[{token}]>" for token in forced))
        fields = {"max_tokens": len(forced), "logprobs": _LIKELIEST, "structured_outputs": grammar}
        (output,) = run(engine, [prompt], [sampling(prompt, **fields)])
        cached.append(output.cached_tokens_details)
        assert list(output.outputs[0].token_ids) == forced, "the grammar forces the tokens"
        logprobs.append([{token: one.logprob for token, one in each.items()} for each in output.outputs[0].logprobs])
        seconds.append((output.metrics.last_token_ts - output.metrics.first_token_ts) / (len(forced) - 1))
    chosen = [each[token] for (_, forced), found in zip(work.texts, logprobs, strict=True)
              for each, token in zip(found, forced, strict=True)]  # fmt: skip
    found["perplexity"] = math.exp(-sum(chosen) / len(chosen))
    pairs = [
        pair for one, other in zip(full or logprobs, logprobs, strict=True) for pair in zip(one, other, strict=True)
    ]
    found["KL"] = sum(kl(one, other) for one, other in pairs) / len(pairs)
    found["same likeliest"] = sum(max(one, key=one.get) == max(other, key=other.get) for one, other in pairs) / len(
        pairs
    )
    found["ms a token"] = 1e3 * min(seconds)
    if any(cached):
        found["tokens from main memory"] = sum(one.host for one in cached if one is not None)
    host = engine._engine._runner.host_memory
    token_bytes = engine._engine._runner.pool.spec.page_bytes // args.page_size
    tier_bytes = host.page_bytes / args.page_size if host is not None else token_bytes
    num_layers = engine._engine._runner.pool.spec.num_layers
    sizes = Sizes(args.context, token_bytes, tier_bytes, args.page_size, num_layers)
    found["KiB"] = (method.kept(sizes) + method.bounds(sizes)) / 1024
    found["KiB read"] = method.read(sizes) / 1024
    return found | {"logprobs": logprobs}


def share_found(texts: Sequence[str], numbers: Sequence[str]) -> float:
    """Returns how many of the numbers begin the answers."""
    return sum(text.strip().startswith(number) for text, number in zip(texts, numbers, strict=True)) / len(numbers)


def kl(one: dict[int, float], other: dict[int, float]) -> float:
    """KL divergence of the other distribution from one, over tokens that both have, and the rest as one token: at most
    the divergence over all tokens.
    """
    shared = [token for token in one if token in other]
    rest, other_rest = (max(1e-9, 1 - sum(math.exp(each[token]) for token in shared)) for each in (one, other))
    total = sum(math.exp(one[token]) * (one[token] - other[token]) for token in shared)
    return total + rest * math.log(rest / other_rest)


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    names = ("KiB", "KiB read", "one", "eight", "KL", "perplexity", "same likeliest", "ms a token")
    print_table(["", *names], [[label, *(found[name] for name in names)] for label, found in result["methods"].items()])
    for label, found in result.get("kvpress", {}).items():
        print(f"kvpress, {label}: {found}")


def plot(result: dict[str, Any], path: Path) -> None:
    """Retrieval and KL over the bytes of one sequence."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(9, 7.2), sharey="row")
    families: dict[str, list[dict[str, Any]]] = {}
    for label, found in result["methods"].items():
        families.setdefault(re.sub(r" 1/\d+( is read)?", "", label), []).append(found)
    titles = {"eight": "one of eight needles found", "KL": "KL to the full cache, nats a token"}
    for row, (name, title) in zip(panels, titles.items(), strict=True):
        for panel, axis in zip(row, ("KiB", "KiB read"), strict=True):
            for label, found in families.items():
                ordered = sorted(found, key=lambda one: one[axis])
                panel.plot([one[axis] for one in ordered], [one[name] for one in ordered], "o-", label=label)
            for label, found in result.get("kvpress", {}).items() if name == "eight" else ():
                share = 1 / int(label.rsplit("/", 1)[1])
                panel.plot([share * result["methods"]["full"]["KiB"]], [found[name]], "kx")
            panel.set_xscale("log", base=2)
            panel.set_xlabel("KiB of keys, values and bounds" + (" that a decode reads" if axis == "KiB read" else ""))
            panel.set_title(title, fontsize=10)
    panels[0][0].set_ylim(-0.03, 1.03)
    panels[1][0].set_yscale("symlog", linthresh=1e-3)
    panels[1][0].set_ylim(bottom=-1e-4)
    panels[1][1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
