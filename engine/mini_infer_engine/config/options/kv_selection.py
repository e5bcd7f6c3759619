"""Says how many pages a decode attends to with --kv-selection, and which always, and checks the options. No torch here.

The method is Quest's (Tang et al. 2024, arXiv 2406.10774).
"""

from mini_infer_contract.engine_options import EngineOptions

DENSE_LAYERS = 2
"""First layers whose decodes attend to all pages, as Quest's authors do: the attention of those is hardly sparse."""
FIRST_PAGES = 1
"""Pages at the beginning that are always attended to: they hold the attention sinks (Xiao et al., arXiv 2309.17453)."""
LAST_PAGES = 2
"""Pages at the end that are always attended to: the one of the new token, and the one before it."""
LEAST_PAGES = FIRST_PAGES + LAST_PAGES + 1
"""The smallest budget in pages, of which one can be chosen."""
DEFAULT_BUDGET_TOKENS = 4096


def selection_fault(options: EngineOptions) -> str | None:
    """Says why page selection does not go with other options; None if it does, or if there is none."""
    if options.kv_selection == "none":
        if options.kv_selection_budget is not None:
            return "--kv-selection-budget goes with --kv-selection quest: set it, or leave the budget out"
        return None
    if options.page_size is not None and (fault := budget_fault(options, options.page_size)) is not None:
        return fault
    if options.speculative_method is not None or options.speculative_model is not None:
        return "--kv-selection does not check draft tokens yet: leave it or --speculative-method out"
    if options.pipeline_parallel_size > 1:
        return "--kv-selection: the stages of a pipeline select no pages yet: set --pipeline-parallel-size 1"
    return None


def budget_fault(options: EngineOptions, page_size: int) -> str | None:
    """Says why the budget is no number of pages of this size that can be selected; None if it is."""
    tokens = budget_tokens(options)
    name = f"--kv-selection-budget = {tokens}"
    if tokens % page_size:
        below = max(LEAST_PAGES, tokens // page_size) * page_size
        return f"{name} is no multiple of the page size, {page_size}: set {below}, or another --page-size"
    if tokens < LEAST_PAGES * page_size:
        return (
            f"{name}: the first page and the last two are always attended to, and one more is the least, "
            f"{LEAST_PAGES * page_size} tokens with --page-size {page_size}: set as many, or a smaller page size"
        )
    return None


def budget_tokens(options: EngineOptions) -> int:
    """Returns the tokens in the pages that a decode attends to."""
    budget = options.kv_selection_budget
    return DEFAULT_BUDGET_TOKENS if budget is None else budget
