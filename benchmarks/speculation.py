"""What speculative decoding gains: tokens a second with guesses and without, on one GPU, in one run.

    python benchmarks/speculation.py --out FILE --time-limit-s 300

`demo`: the demo model with its draft, real questions: acceptance, tokens a pass, tokens a second, time to the first
token. `shapes`: a 7B shape with a 0.5B shape as draft and with a head, random weights, so that the cost is real; how
many guesses are right is set here, where they are checked. `ngram`: the same shape with prompt look-up. `chats`:
growing chats of the demo model, which go on with its own answers, with prompt look-up: all turns together.
Ratios are to the plain engine with the same settings, which is first: of a second of runs together, of the median run,
of the first run of a batch and of the slowest other one. Engines of a part start at the same time; the demo model's
then take turns, run by run, the others follow each other. "share": of all tokens, those made by passes with guesses.
`vllm`: the shapes by vLLM where it is present, with the same draft and as many guesses; its rejection sampler is told
the acceptance ("synthetic"). Both are compared by all tokens a second, prompts included.
"""

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import engines
from common.budget import Budget
from common.engines import SETTINGS, SMOKE_MODEL, SMOKE_SETTINGS
from common.models import CONFIGS, kv_bytes_per_token, model_folder, vocabulary
from common.report import integers, make_parser, print_table, save, say, words
from common.together import measure_in_turn

if TYPE_CHECKING:
    from mini_infer_contract.prompt import PromptEncoder
    from mini_infer_engine.core.engine import Engine
    from mini_infer_engine.core.request import Request
    from mini_infer_engine.core.stats import EngineStats

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
    from mini_infer_contract.prompt import PromptAssets, PromptEncoder
    from mini_infer_engine.core.request import Request, SamplingParams
    from mini_infer_engine.model_path import resolve_model

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

        for label, figures in measured_in_turns(made, partial(run_of, requests)).items():
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
    from mini_infer_contract.prompt import PromptAssets, PromptEncoder
    from mini_infer_engine.core.request import Request, SamplingParams
    from mini_infer_engine.model_path import resolve_model

    encoder = PromptEncoder(PromptAssets.from_directory(resolve_model("demo")))
    texts = [question.format(name) for question in _QUESTIONS for name in _NAMES]
    sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)

    def hold(batch: int, engine: "Engine", name: str) -> dict[str, float]:
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
            asked = question_ids(encoder, _FOLLOW_UPS[turn % len(_FOLLOW_UPS)])
            prompts = [prompt + said + asked for prompt, said in zip(prompts, answers.values(), strict=True)]
        seconds = time.perf_counter() - begin
        return {"tok_s": made / seconds, "decoding s": seconds, "made": made, "ttft ms p50": float("nan")}

    engines_by_label = {label: make_engine(settings | options) for label, options in variants.items()}
    yield {}
    for batch in batches:
        for label, figures in measured_in_turns(engines_by_label, partial(hold, batch)).items():
            yield {f"{label}, batch {batch}": figures}


def question_ids(encoder: "PromptEncoder", question: str) -> list[int]:
    """A turn of a chat; behind an answer that was cut it begins the next one all the same."""
    from mini_infer_contract.prompt import chat_prompt_ids

    return list(chat_prompt_ids(encoder, {"messages": [{"role": "user", "content": question}]}))


def shapes(
    settings: dict[str, Any], variants: dict[str, dict[str, Any]], batches: list[int], acceptances: list[float]
) -> Iterator[dict[str, Any]]:
    """Random weights and scripted acceptance; without guesses, once for each batch."""
    from mini_infer_engine.core.request import Request, SamplingParams

    dice, on_gpu, known = random.Random(1), settings.get("device") != "cpu", vocabulary(settings["model"], 100_000)
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
                        for place, one in enumerate(random_prompts(dice, batch, known))
                    ]

                scripted = f" at {acceptance}" if script is not None else ""
                yield {f"{label}{scripted}, batch {batch}": measured(engine, requests)}


PROMPT_TOKENS, ANSWER_TOKENS = 128, 256
"""Of the shapes' requests."""


def random_prompts(dice: random.Random, batch: int, known: int = 100_000) -> list[list[int]]:
    """Of tokens below `known`."""
    return [[dice.randrange(1000, known) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]


def peer(settings: dict[str, Any], variants: dict[str, dict[str, Any]], batches: list[int]) -> Iterator[dict[str, Any]]:
    """The shapes by vLLM: {"all tok_s"} by label and batch, under the labels of ours."""
    for label, options in variants.items():
        engine = engines.load(
            "vllm", settings["model"], settings | ({"speculative_config": options} if options else {})
        )
        yield {}
        for batch in batches:
            yield {f"{label}, batch {batch}": peer_measured(engine, batch)}


def peer_measured(engine: engines.Engine, batch: int) -> dict[str, float]:
    """The runs after the first one together, of a second at least."""
    dice, limits = random.Random(1), [ANSWER_TOKENS] * batch
    engine.run(random_prompts(dice, batch), limits, 0.0)
    made, seconds = 0, 0.0
    while seconds < 2 * LEAST_S:
        prompts, begin = random_prompts(dice, batch), time.perf_counter()
        made += engine.run(prompts, limits, 0.0)
        seconds += time.perf_counter() - begin
    return {"all tok_s": made / seconds}


LEAST_S = 1.0
"""Of decoding, that is measured: a run of a small model takes 20 ms, and a trial of guesses is in every third one."""


def measured(engine: "Engine", requests: Any) -> dict[str, float]:
    """The runs after the first, which shows the engine what passes take, all together; and the first one's rate."""
    return measured_in_turns({"": engine}, partial(run_of, requests))[""]


def run_of(requests: Any, engine: "Engine", name: str) -> dict[str, float]:
    """A run over what `requests` makes under a name."""
    return run(engine, requests(name))


def measured_in_turns(made: "dict[str, Engine]", one_run: Run) -> dict[str, dict[str, float]]:
    """The same of several engines, whose runs take turns: what else the machine does hits all alike."""
    first = {label: one_run(engine, "first") for label, engine in made.items()}
    before = {label: engine.stats() for label, engine in made.items()}
    runs = {label: list[dict[str, float]]() for label in made}
    while min(sum(one["decoding s"] for one in each) for each in runs.values()) < LEAST_S:
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

        from mini_infer_engine.runtime import cuda_speculation

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
        from mini_infer_engine.runtime import torch_speculation

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
    from mini_infer_engine.config.settings import EngineSettings
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
        help="of vLLM, which is started for each (default: 0.8)",
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
        options.parts, options.batches, options.acceptances = ["demo", "chats", "shapes"], [1, 2], [0.8]
        options.target = options.draft = SMOKE_MODEL
    parts, batches = options.parts, options.batches
    failed = False
    with tempfile.TemporaryDirectory() as root:
        for part in parts:
            if part == "vllm" and not engines.is_present("vllm"):
                say("vllm is not here")
                continue
            if not budget.allows(part):
                continue
            say(part)
            function = {"demo": demo, "chats": chats, "vllm": peer}.get(part, shapes)
            starts = {}
            for variants in in_one_process(part, variants_of(part, options)):
                settings, arguments = settings_of(part, options, Path(root), max(batches))
                if options.smoke:
                    settings |= SMOKE_SETTINGS | {"kv_cache_memory": 64_000_000}
                for label, variant in variants.items():
                    if "speculative_model" in variant and part == "shapes":
                        variants[label] = variant | {"speculative_model": settings[label]}
                    if part == "vllm" and variant:
                        variants[label] = variant | {"model": settings["draft"]}
                for name in ("draft", "head"):
                    settings.pop(name, None)
                starts[", ".join(variants)] = (function, (settings, variants, batches, *arguments))

            def note(label: str, figures: dict[str, Any], part: str = part) -> None:
                say(f"  {label}")
                found.setdefault(part, {}).update(figures)
                save(options.out, result)

            with budget.spending(part):
                failed |= bool(measure_in_turn(starts, budget.left_s, note))
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
        own = more | {"method": "draft_model", "rejection_sample_method": "synthetic"}
        return {"plain": {}} | {
            # It wants the chance that all guesses up to each place are right.
            f"draft at {one}": own
            | {"synthetic_acceptance_rates": [one**place for place in range(1, options.guesses + 1)]}
            for one in options.peer_acceptances
        }
    looked_up = more | {"speculative_method": "ngram"}
    if part in ("ngram", "chats"):
        # Two engines alike differ, too: their graphs and weights lie elsewhere in memory.
        return {"plain": {}, "ngram": looked_up} | ({"plain again": {}} if part == "chats" else {})
    draft = more | {"speculative_model": "demo-draft"}  # of shapes, others take their place
    head = more | {"speculative_method": "head", "speculative_model": "demo-head"}
    if part == "shapes":
        return {"plain": {}, "draft": draft, "head": head}
    trained = {"head": head} if resolve_model("demo-head").exists() else {}
    return {"plain": {}, "draft": draft, **trained, "ngram": looked_up, "plain again": {}}


def settings_of(part: str, options: Any, root: Path, max_num_seqs: int) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Of every engine of a part, and more arguments of what measures it."""
    if part in ("demo", "chats"):
        sizes = (2, 8) if options.smoke else (CHAT_TURNS, CHAT_ANSWER)
        settings = {"model": "demo", "max_num_seqs": max_num_seqs, "kv_cache_memory": _DEMO_KV_BYTES}
        return settings, sizes if part == "chats" else ()
    target = model_folder(options.target, root)
    name = f"{options.draft} as draft"
    CONFIGS[name] = CONFIGS[options.draft] | {"vocab_size": CONFIGS[options.target]["vocab_size"]}
    head = head_folder(CONFIGS[options.target], root, options.draft_vocab_size)
    drafts = {"draft": model_folder(name, root), "head": head}
    tokens = max_num_seqs * 2 * (PROMPT_TOKENS + ANSWER_TOKENS)
    settings = SETTINGS | {"model": target, **drafts, "max_num_seqs": max_num_seqs, "max_model_len": 2048}
    settings |= engines.share_of_gpu(tokens * kv_bytes_per_token(target))
    return settings, () if part == "vllm" else (options.acceptances,)


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
    ours, rows = parts.get("shapes", {}), []
    for label, figures in parts.get(part, {}).items():
        rate = ours.get(label, {}).get("all tok_s", float("nan"))
        figures["ours / vllm"] = rate / figures["all tok_s"]
        rows.append([label, rate, figures["all tok_s"], figures["ours / vllm"]])
    print_table([part, "ours, all tok/s", "vllm", "ratio"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
