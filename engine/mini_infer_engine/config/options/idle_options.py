"""Finds options that were set and have no effect, because the feature that they belong to is off. No torch here."""

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.options import option_rows
from mini_infer_engine.config.options.speculation import speculation_of


def idle_options(options: EngineOptions) -> list[str]:
    """Returns the flag of each such option, with the option that it needs to have an effect."""
    speculation = speculation_of(options)
    is_ngram = speculation is not None and speculation.method == "ngram"
    ngram = "--speculative-method ngram"
    needs = {
        "num_speculative_tokens": (speculation is not None, "--speculative-method or --speculative-model"),
        "prompt_lookup_max": (is_ngram, ngram),
        "prompt_lookup_min": (is_ngram, ngram),
        "quantization_calibration": (
            options.quantization in ("int4", "w8a8-int8"),
            "--quantization int4 or w8a8-int8",
        ),
    }
    return [
        f"{row.flag} (needs {needs[row.name][1]})"
        for row in option_rows(EngineOptions)
        if row.name in needs and not needs[row.name][0] and getattr(options, row.name) != row.default
    ]
