"""What speculative decoding gains: tokens a second with guesses and without, on one GPU, in one run.

    python benchmarks/speculation.py --out FILE --time-limit-s 300

`demo`: the demo model with its draft, real questions: acceptance, tokens a pass, tokens a second, time to the first
token. `shapes`: a 7B shape with a 0.5B shape as draft, with a head, and with an EAGLE-3 head, random weights, so that
the cost is real; how many guesses are right is set here, where they are checked. `ngram`: the same shape with prompt
look-up. `chats`: growing chats of the demo model, which go on with its own answers, with prompt look-up: all turns
together.
Ratios are to the plain engine with the same settings, which is first: of a second of runs together, of the median run,
of the first run of a batch and of the slowest other one. Engines of a part start at the same time; the demo model's
then take turns, run by run, the others follow each other. "share": of all tokens, those made by passes with guesses.
`vllm`: the shapes by vLLM where it is present, with as many guesses, by --peer-methods: the same draft (draft_model), a
head of its own kind (of the same width and guessed vocabulary as ours), the EAGLE-3 head of ours, and prompt look-up
(ngram_gpu, n-grams of 2 to 4 tokens as ours; look-up on the CPU wants numba). Its rejection sampler is told the
acceptance ("synthetic"), one after another of --peer-acceptances in one start. Then all engines of the shapes read
checkpoints whose model walks in circles, so that look-up always finds its guesses. Both are compared by all tokens a
second, prompts included. beside_vllm.py has the same of both engines with a single start.
"""

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import engines
from common.budget import Budget
from common.engines import SETTINGS, SMOKE_MODEL, SMOKE_SETTINGS
from common.isolation import isolated
from common.models import CONFIGS, kv_bytes_per_token, model_folder, vocabulary
from common.report import integers, log_line, make_parser, print_table, save, words
from common.speculation_checkpoints import circling_prompts, peer_head_config, write_speculation_checkpoints
from common.together import measure_alternately
from common.vllm_acceptance import QUALIFIED_NAME as ACCEPTANCE

if TYPE_CHECKING:
    from mini_infer_engine.core.engine import Engine
    from mini_infer_engine.core.request import Request
    from mini_infer_engine.core.stats import EngineStats
    from mini_infer_prompts.prompt import PromptEncoder

Run = Callable[["Engine", str], dict[str, float]]
"""What an engine makes of one run's requests, which are called by a name."""

_QUESTIONS = ("What does {} do?", "How do I use {}?", "What is the signature of {}?", "Explain {}.")
_NAMES = (
    *("itertools.chain", "json.dumps", "os.path.join", "functools.partial", "collections.Counter", "asyncio.gather"),
    *("re.sub", "math.sqrt", "str.split", "dict.get", "pathlib.Path", "random.choice", "heapq.heappush"),
    *("bisect.bisect", "csv.reader", "struct.pack"),
)


def run(engine: "Engine", requests: "list[Request]") -> dict[str, float]:
    """Tokens a second of decoding: from the moment when all have their first token to the first one's end."""
    begin = time.perf_counter()
    first: dict[str, float] = {}
    made = made_before = made_then = 0
    decoding_since, ended, now = 0.0, 0.0, begin
    for request in requests:
        engine.add(request)
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            first.setdefault(output.request_id, now)
            made += len(output.token_ids)
            if output.finish_reason is not None and not ended:
                ended, made_then = now, made
        if len(first) == len(requests) and not decoding_since:
            decoding_since, made_before = now, made
    decoding_s = max(1e-9, ended - decoding_since)
    ttft = sorted(moment - begin for moment in first.values())
    return {
        "tok_s": (made_then - made_before) / decoding_s,
        "decoding s": decoding_s,
        "made": made,
        "all tok_s": made / (now - begin),
        "ttft ms p50": ttft[len(ttft) // 2] * 1e3,
    }


def counted(before: "EngineStats", after: "EngineStats", made: float) -> dict[str, float]:
    """What was guessed between two moments, in which so many tokens were made."""
    drafts, guesses = after.drafts - before.drafts, after.draft_tokens - before.draft_tokens
    accepted = sum(after.accepted_tokens_by_position) - sum(before.accepted_tokens_by_position)
    return {
        "of passes with guesses": (drafts + accepted) / made,
        "acceptance": accepted / guesses if guesses else 0.0,
        "tokens a pass": 1 + accepted / drafts if drafts else 1.0,
        "guesses a pass": guesses / drafts if drafts else 0.0,
    }


def demo(settings: dict[str, Any], variants: dict[str, dict[str, Any]], batches: list[int]) -> Iterator[dict[str, Any]]:
    """The demo model on questions about Python's library, greedy."""
    from mini_infer_engine.core.request import Request, SamplingParams
    from mini_infer_engine.model_path import resolve_model
    from mini_infer_prompts.prompt import PromptAssets, PromptEncoder

    encoder = PromptEncoder(PromptAssets.from_directory(resolve_model("demo")))
    texts = [question.format(name) for question in _QUESTIONS for name in _NAMES]
    prompts = [question_ids(encoder, text) for text in texts]
    made = {label: make_engine(settings | options) for label, options in variants.items()}
    yield {}
    for batch in batches:

        def requests(name: str, batch: int = batch) -> "list[Request]":
            sampling = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
            return [
                Request(request_id=f"{name}{place}", prompt_token_ids=prompts[place % len(prompts)], sampling=sampling)
                for place in range(batch)
            ]

        for label, figures in measured_alternately(made, partial(run_of, requests), least_s(settings)).items():
            yield {f"{label}, batch {batch}": figures}


CHAT_TURNS, CHAT_ANSWER = 6, 96
"""Turns, and tokens of an answer, as in the growing chats of `common/loads.py`."""
_DEMO_KV_BYTES = 8 << 30
"""Of each engine of the demo model, whatever the others of its GPU have."""
_FOLLOW_UPS = (
    "Show me an example.",
    "What does it return?",
    "Say that again in other words.",
    "Which errors can it raise?",
)


def chats(
    settings: dict[str, Any], variants: dict[str, dict[str, Any]], batches: list[int], turns: int, answer: int
) -> Iterator[dict[str, Any]]:
    """Growing chats with the demo model, greedy, all of a batch at once turn by turn."""
    from mini_infer_engine.core.request import Request, SamplingParams
    from mini_infer_engine.model_path import resolve_model
    from mini_infer_prompts.prompt import PromptAssets, PromptEncoder

    encoder = PromptEncoder(PromptAssets.from_directory(resolve_model("demo")))
    texts = [question.format(name) for question in _QUESTIONS for name in _NAMES]
    sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)

    def measure_chats(batch: int, engine: "Engine", name: str) -> dict[str, float]:
        """One turn after another; a chat's next prompt is the last one, its answer and a new question."""
        prompts = [question_ids(encoder, text) for text in itertools.islice(itertools.cycle(texts), batch)]
        begin, made = time.perf_counter(), 0
        for turn in range(turns):
            answers: dict[str, list[int]] = {f"{name}{turn}-{place}": [] for place in range(batch)}
            for request_id, prompt in zip(answers, prompts, strict=True):
                engine.add(Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
            while engine.has_work:
                for output in engine.step():
                    answers[output.request_id] += output.token_ids
            made += sum(map(len, answers.values()))
            follow_up = question_ids(encoder, _FOLLOW_UPS[turn % len(_FOLLOW_UPS)])
            prompts = [prompt + reply + follow_up for prompt, reply in zip(prompts, answers.values(), strict=True)]
        seconds = time.perf_counter() - begin
        return {"tok_s": made / seconds, "decoding s": seconds, "made": made, "ttft ms p50": float("nan")}

    engines_by_label = {label: make_engine(settings | options) for label, options in variants.items()}
    yield {}
    for batch in batches:
        for label, figures in measured_alternately(
            engines_by_label, partial(measure_chats, batch), least_s(settings)
        ).items():
            yield {f"{label}, batch {batch}": figures}


def question_ids(encoder: "PromptEncoder", question: str) -> list[int]:
    """A turn of a chat; behind an answer that was cut it begins the next one all the same."""
    from mini_infer_prompts.prompt import chat_prompt_ids

    return list(chat_prompt_ids(encoder, {"messages": [{"role": "user", "content": question}]}))


def shapes(
    settings: dict[str, Any], variants: dict[str, dict[str, Any]], batches: list[int], acceptances: list[float]
) -> Iterator[dict[str, Any]]:
    """Random weights and scripted acceptance; without guesses, once for each batch."""
    from mini_infer_engine.core.request import Request, SamplingParams

    dice, on_gpu, vocabulary_size = (
        random.Random(1),
        settings.get("device") != "cpu",
        vocabulary(settings["model"], 100_000),
    )
    for label, options in variants.items():
        script = (Script() if on_gpu else TorchScript()) if options else None
        engine = make_engine(settings | options)
        yield {}
        for batch in batches:
            for acceptance in acceptances if script is not None else [0.0]:
                if script is not None:
                    script.set(acceptance)

                def requests(name: str, batch: int = batch) -> "list[Request]":
                    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
                    return [
                        Request(request_id=f"{name}{place}", prompt_token_ids=one, sampling=sampling)
                        for place, one in enumerate(circling_prompts(dice, batch, PROMPT_TOKENS, vocabulary_size))
                    ]

                scripted = f" at {acceptance}" if script is not None else ""
                yield {f"{label}{scripted}, batch {batch}": measured(engine, requests, least_s(settings))}


PROMPT_TOKENS, ANSWER_TOKENS = 128, 256
"""Of the shapes' requests."""


def peer(
    settings: dict[str, Any], variants: dict[str, dict[str, Any]], batches: list[int], acceptances: list[float]
) -> Iterator[dict[str, Any]]:
    """The shapes by vLLM: {"all tok_s"} by label and batch, under the labels of ours.

    A variant starts with the first acceptance; what needs its workers' extension comes after all that does not.
    """
    vocabulary_size = vocabulary(settings["model"], 100_000)
    for label, options in variants.items():
        own = {"speculative_config": options, "worker_extension_cls": ACCEPTANCE} if options else {}
        engine: Any = engines.load("vllm", settings["model"], settings | own)
        yield {}
        for acceptance in acceptances if options else [0.0]:
            if acceptance != acceptances[0] and options:
                engine.set_acceptance(acceptance)
            scripted = f" at {acceptance}" if options else ""
            for batch in batches:
                yield {
                    f"{label}{scripted}, batch {batch}": peer_measured(
                        engine, batch, vocabulary_size, 2 * least_s(settings)
                    )
                }
            if options:
                found = {"tokens a pass": tokens_a_pass(engine, batches[-1], vocabulary_size)}
                yield {f"{label}{scripted}, batch {batches[-1]}": found}


def peer_measured(engine: engines.Engine, batch: int, vocabulary_size: int, at_least_s: float) -> dict[str, float]:
    """The runs after the first one together."""
    dice, limits = random.Random(1), [ANSWER_TOKENS] * batch
    engine.run(circling_prompts(dice, batch, PROMPT_TOKENS, vocabulary_size), limits, 0.0)
    made, seconds = 0, 0.0
    while seconds < at_least_s:
        prompts, begin = circling_prompts(dice, batch, PROMPT_TOKENS, vocabulary_size), time.perf_counter()
        made += engine.run(prompts, limits, 0.0)
        seconds += time.perf_counter() - begin
    return {"all tok_s": made / seconds}


def tokens_a_pass(engine: Any, batch: int, vocabulary_size: int) -> float:
    """Of a sequence, prompts' passes included: whether guesses are there and as many right as was asked for."""
    prompts, before = circling_prompts(random.Random(2), batch, PROMPT_TOKENS, vocabulary_size), engine.passes_so_far()
    made: int = engine.run(prompts, [ANSWER_TOKENS] * batch, 0.0)
    passes: int = engine.passes_so_far() - before
    return made / batch / max(1, passes)


def least_s(settings: dict[str, Any]) -> float:
    """Of decoding, that is measured: a run of a small model takes 20 ms, and a trial of guesses is in every third one.

    CPUs see smoke runs only, where any figure will do.
    """
    return 0.1 if settings.get("device") == "cpu" else 1.0


def measured(engine: "Engine", requests: Any, at_least_s: float) -> dict[str, float]:
    """The runs after the first, which shows the engine what passes take, all together; and the first one's rate."""
    return measured_alternately({"": engine}, partial(run_of, requests), at_least_s)[""]


def run_of(requests: Any, engine: "Engine", name: str) -> dict[str, float]:
    """A run over what `requests` makes under a name."""
    return run(engine, requests(name))


def measured_alternately(made: "dict[str, Engine]", one_run: Run, at_least_s: float) -> dict[str, dict[str, float]]:
    """The same of several engines, whose runs take turns: what else the machine does hits all alike."""
    first = {label: one_run(engine, "first") for label, engine in made.items()}
    before = {label: engine.stats() for label, engine in made.items()}
    runs = {label: list[dict[str, float]]() for label in made}
    while min(sum(one["decoding s"] for one in each) for each in runs.values()) < at_least_s:
        for label, engine in made.items():
            runs[label].append(one_run(engine, f"timed{len(runs[label])}-"))
    return {
        label: _together(runs[label])
        | {"first tok_s": first[label]["tok_s"]}
        | counted(before[label], engine.stats(), sum(one["made"] for one in runs[label]))
        for label, engine in made.items()
    }


def _together(runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians; the rate of all runs' tokens in all their seconds, the median run's and the slowest one's."""
    seconds = sum(one["decoding s"] for one in runs)
    found = {name: sorted(one[name] for one in runs)[len(runs) // 2] for name in runs[0]}
    found["median tok_s"] = found["tok_s"]
    found["tok_s"] = sum(one["tok_s"] * one["decoding s"] for one in runs) / seconds
    return found | {"least tok_s": min(one["tok_s"] for one in runs)}


class Script:
    """Makes guesses right with a set probability, where the engine checks them: all that it computes stays as it is."""

    def __init__(self) -> None:
        import torch

        from mini_infer_engine.runtime.cuda import speculation as cuda_speculation

        self._chance = torch.zeros((), device="cuda")
        settle = cuda_speculation.settle_guesses

        def scripted(slots: Any, limits: Any, sampled: Any, state: Any, history: Any, results: Any) -> None:
            rows, queries = slots.shape[0], results.shape[1] - 1
            own = slots.long()
            tokens = sampled[: rows * queries].view(rows, queries)[:, :-1]
            right = torch.rand(tokens.shape, device=tokens.device) < self._chance
            guesses = torch.where(right, tokens, (tokens + 1) % 1000)
            places = state.positions[own][:, None] + torch.arange(1, queries, device=tokens.device)
            history[own[:, None], places.long()] = guesses.int()
            settle(slots, limits, sampled, state, history, results)

        cuda_speculation.settle_guesses = scripted

    def set(self, acceptance: float) -> None:
        """From the next pass on."""
        self._chance.fill_(acceptance)


class TorchScript:
    """The same where guesses are checked by plain torch."""

    def __init__(self) -> None:
        from mini_infer_engine.runtime.cpu import speculation as torch_speculation

        self._chance, self._dice = 0.0, random.Random(2)
        torch_speculation.right_tokens = self._right_tokens

    def set(self, acceptance: float) -> None:
        """See `Script`."""
        self._chance = acceptance

    def _right_tokens(self, drafts: list[int], sampled: list[int]) -> list[int]:
        right = itertools.takewhile(lambda _: self._dice.random() < self._chance, drafts)
        return list(sampled[: 1 + sum(1 for _ in right)])


def make_engine(settings: dict[str, Any]) -> "Engine":
    """Over a runner of its own."""
    from mini_infer_engine.config.options.settings import EngineSettings
    from mini_infer_engine.core.engine import Engine
    from mini_infer_engine.runtime.model_runner import load_runner

    of_vllm = {"kv_cache_memory_bytes": "kv_cache_memory"}
    runner = load_runner(EngineSettings(**{of_vllm.get(name, name): value for name, value in settings.items()}))
    return Engine(runner.settings, runner, (), runner.max_model_len, "", record_events=False)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--parts", type=words, default=words("demo,chats,shapes"), metavar="demo,chats,shapes,ngram,vllm"
    )
    parser.add_argument("--batches", type=integers, default=[1, 8, 32, 128], metavar="N,...")
    parser.add_argument("--guesses", type=int, default=5, metavar="N", help="of a pass, at most (default: 5)")
    parser.add_argument(
        "--acceptances", type=lambda text: [float(one) for one in words(text)], default=[0.6, 0.7, 0.8, 0.9]
    )
    parser.add_argument(
        "--peer-acceptances",
        type=lambda text: [float(one) for one in words(text)],
        default=[0.8],
        help="of vLLM (default: 0.8)",
    )
    parser.add_argument(
        "--peer-methods",
        type=words,
        default=["draft"],
        metavar="draft,head,eagle3,ngram",
        help="of vLLM (default: draft)",
    )
    parser.add_argument(
        "--methods", type=words, default=words("draft,head,eagle3"), metavar="draft,head,eagle3", help="of the shapes"
    )
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        default=32_000,
        metavar="N",
        help="tokens that the shape's head may guess, 0: all (default: 32000, as EAGLE-3's heads have them)",
    )
    parser.add_argument("--target", default="qwen2.5-7b", metavar="NAME")
    parser.add_argument("--draft", default="qwen2.5-0.5b", metavar="NAME")
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    found: dict[str, dict[str, dict[str, float]]] = {}
    result: dict[str, Any] = {"guesses": options.guesses, "draft vocabulary": options.draft_vocab_size, "parts": found}
    if options.smoke:
        options.batches, options.acceptances = [1, 2], [0.8]
        options.target = options.draft = SMOKE_MODEL
    parts, batches = options.parts, options.batches
    failed = False
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        written = None
        if "vllm" in parts and engines.is_present("vllm"):
            written = stack.enter_context(written_checkpoints(options, Path(root), budget))
        for part in parts:
            if part == "vllm" and not engines.is_present("vllm"):
                log_line("vllm is not here")
                continue
            if not budget.allows(part):
                continue
            log_line(part)
            function = {"demo": demo, "chats": chats, "vllm": peer}.get(part, shapes)
            starts = {}
            for variants in in_one_process(part, variants_of(part, options)):
                settings, arguments = settings_of(part, options, Path(root), max(batches), written)
                if options.smoke:
                    settings |= SMOKE_SETTINGS | {"kv_cache_memory": 64_000_000}
                    if written is not None:
                        settings["load_format"] = "auto"
                settings, variants = with_folders(part, settings, variants)
                starts[", ".join(variants)] = (function, (settings, variants, batches, *arguments))

            def note(label: str, figures: dict[str, Any], part: str = part) -> None:
                log_line(f"  {label}")
                for name, values in figures.items():
                    found.setdefault(part, {}).setdefault(name, {}).update(values)
                save(options.out, result)

            with budget.spending(part):
                failed |= bool(measure_alternately(starts, budget.left_s, note))
            (show_peer if part == "vllm" else show)(part, found)
    save(options.out, result)
    return int(failed)


def in_one_process(part: str, variants: dict[str, dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """The demo model's engines fit beside each other, and take turns."""
    return [variants] if part in ("demo", "chats") else [{label: variant} for label, variant in variants.items()]


def variants_of(part: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Options by label, the plain engine first."""
    from mini_infer_engine.model_path import resolve_model

    more: dict[str, Any] = {"num_speculative_tokens": options.guesses}
    if part == "vllm":
        # It wants the chance that all guesses up to each place are right.
        rates = [options.peer_acceptances[0] ** place for place in range(1, options.guesses + 1)]
        own = more | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        methods: dict[str, dict[str, Any]] = {
            "draft": {"method": "draft_model"},
            "head": {"method": "eagle3"},
            "eagle3": {"method": "eagle3"},
            "ngram": {"method": "ngram_gpu", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        }
        return {"plain": {}} | {name: own | methods[name] for name in options.peer_methods}
    looked_up = more | {"speculative_method": "ngram"}
    if part in ("ngram", "chats"):
        # Two engines alike differ, too: their graphs and weights lie elsewhere in memory.
        return {"plain": {}, "ngram": looked_up} | ({"plain again": {}} if part == "chats" else {})
    draft = more | {"speculative_model": "demo-draft"}  # of shapes, others take their place
    head = more | {"speculative_method": "head", "speculative_model": "demo-head"}
    if part == "shapes":
        eagle3 = more | {"speculative_method": "eagle3", "speculative_model": "demo-head"}
        methods = {"draft": draft, "head": head, "eagle3": eagle3}
        return {"plain": {}} | {name: methods[name] for name in options.methods}
    trained = {"head": head} if resolve_model("demo-head").exists() else {}
    return {"plain": {}, "draft": draft, **trained, "ngram": looked_up, "plain again": {}}


def settings_of(
    part: str, options: Any, root: Path, max_num_seqs: int, written: Path | None = None
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Of every engine of a part, and more arguments of what measures it.

    `written`: where `written_checkpoints` are; None: weights are made.
    """
    if part in ("demo", "chats"):
        sizes = (2, 8) if options.smoke else (CHAT_TURNS, CHAT_ANSWER)
        settings = {"model": "demo", "max_num_seqs": max_num_seqs, "kv_cache_memory": _DEMO_KV_BYTES}
        return settings, sizes if part == "chats" else ()
    folders = folders_of(options, root)
    tokens = max_num_seqs * 2 * (PROMPT_TOKENS + ANSWER_TOKENS)
    settings = SETTINGS | {"max_num_seqs": max_num_seqs, "max_model_len": 2048, "max_num_batched_tokens": 8192}
    settings |= engines.share_of_gpu(tokens * kv_bytes_per_token(folders["target"]))
    if written is not None:
        folders = {name: str(written / name) for name in folders}
        settings["load_format"] = "auto"
    settings["model"] = folders.pop("target")
    return settings | folders, (options.peer_acceptances if part == "vllm" else options.acceptances,)


def with_folders(
    part: str, settings: dict[str, Any], variants: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Those of drafts and heads move from the settings into the variants that have such a model."""
    peer_head = {"model": settings.get("peer_head")}
    of_vllm = {"draft": {"model": settings.get("draft")}, "head": peer_head, "eagle3": peer_head}
    found = dict[str, dict[str, Any]]()
    for label, variant in variants.items():
        found[label] = dict(variant)
        if part == "vllm":
            found[label] |= of_vllm.get(label, {})
        elif part == "shapes" and "speculative_model" in variant:
            found[label]["speculative_model"] = settings["peer_head" if label == "eagle3" else label]
    return {name: value for name, value in settings.items() if name not in _MODELS}, found


_MODELS = ("draft", "head", "peer_head")


def folders_of(options: Any, root: Path) -> dict[str, str]:
    """With a config.json each: target, draft, and both engines' heads."""
    name, config = f"{options.draft} as draft", CONFIGS[options.target]
    CONFIGS[name] = CONFIGS[options.draft] | {"vocab_size": config["vocab_size"]}
    peer_head = peer_head_config(config, options.draft_vocab_size, config["intermediate_size"] // 2)
    (root / "peer head").mkdir(exist_ok=True)
    (root / "peer head" / "config.json").write_text(json.dumps(peer_head))
    return {
        "target": model_folder(options.target, root),
        "draft": model_folder(name, root),
        "head": head_folder(config, root, options.draft_vocab_size),
        "peer_head": str(root / "peer head"),
    }


@contextmanager
def written_checkpoints(options: Any, root: Path, budget: Budget) -> Iterator[Path]:
    """The folder of all that both engines load, by the names of `folders_of`. RuntimeError: it could not be written."""
    written, folders = root / "written", folders_of(options, root)
    log_line("checkpoints")
    with budget.spending("checkpoints"):
        made_checkpoints = isolated(
            write_speculation_checkpoints, *folders.values(), str(written),
            timeout_s=budget.left_s, note=lambda part: log_line(f"  {part}"),
        )  # fmt: skip
    if "error" in made_checkpoints:
        raise RuntimeError(made_checkpoints["error"])
    try:
        yield written
    finally:
        shutil.rmtree(written, ignore_errors=True)


def head_folder(config: dict[str, Any], root: Path, draft_vocab_size: int) -> str:
    """A head of about one layer's size for a shape: its first, middle and last layers are read.

    `draft_vocab_size`: of the tokens that it may guess; 0: all.
    """
    hidden_size, layers = config["hidden_size"], config["num_hidden_layers"]
    made = {
        "architectures": ["MiniInferSpeculativeHead"],
        "hidden_size": hidden_size,
        "width": hidden_size,
        "intermediate_size": config["intermediate_size"] // 2,
        "layers": sorted({1, layers // 2, layers - 1}),
        "draft_vocab_size": min(draft_vocab_size, config["vocab_size"]) or None,
    }
    folder = root / "head"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made))
    return str(folder)


def show(part: str, parts: dict[str, dict[str, dict[str, float]]]) -> None:
    """A line for each variant, acceptance and batch, with its ratio to the plain engine at the same batch."""
    rows, found = [], parts.get(part, {})
    for label, figures in found.items():
        plain = found.get(f"plain, {label.rpartition(', ')[2]}", {})
        figures["ratio"] = figures["tok_s"] / plain["tok_s"] if plain else float("nan")
        for which in ("median", "first", "least"):
            rate = f"{which} tok_s"
            figures[f"{which} ratio"] = figures[rate] / plain[rate] if plain else float("nan")
        ratios = ("ratio", "median ratio", "first ratio", "least ratio")
        names = ("tok_s", *ratios, "of passes with guesses", "acceptance")
        rows.append([label, *(figures[name] for name in (*names, "tokens a pass", "guesses a pass", "ttft ms p50"))])
    header = [part, "tok/s", "ratio", "median", "first run", "least", "share", "acceptance", "tokens a pass", "guesses"]
    header.append("ttft ms")
    print_table(header, rows)


def show_peer(part: str, parts: dict[str, dict[str, dict[str, float]]]) -> None:
    """A line for each of vLLM's figures, with ours of the same name, where there is one, and the ratio."""
    ours, rows = parts.get("ngram", {}) | parts.get("shapes", {}), []
    for label, figures in parts.get(part, {}).items():
        rate = ours.get(label, {}).get("all tok_s", float("nan"))
        figures["ours / vllm"] = rate / figures["all tok_s"]
        rows.append([label, rate, figures["all tok_s"], figures["ours / vllm"], figures.get("tokens a pass")])
    print_table([part, "ours, all tok/s", "vllm", "ratio", "tokens a pass"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
