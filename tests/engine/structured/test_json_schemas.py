"""Outputs of JSON schemas validate, whatever the model would like to say: random logits over the demo's vocabulary."""

import json
import re
from collections import Counter
from datetime import date
from decimal import Decimal
from functools import cache

import jsonschema
import pytest

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.structured.checker import GrammarChecker
from mini_infer_engine.structured.grammar import of_json_schema
from mini_infer_prompts.prompt import PromptAssets
from mini_infer_prompts.tokenizer_files import load_tokenizer
from tests.support.json_schemas import LEVELS, Graded, features_of, graded_schemas
from tests.support.random_runner import RandomRunner

MAX_TOKENS = 600
formats = jsonschema.FormatChecker()


TIME = re.compile(r"\d\d:\d\d:\d\d(\.\d+)?(z|[+-]\d\d:\d\d)", re.I)


@formats.checks("date", ValueError)
def is_date(text: object) -> bool:
    """RFC 3339's, which has a year 0 where Python has none."""
    return not isinstance(text, str) or date.fromisoformat(re.sub("^0000", "2000", text)) is not None


@formats.checks("time")
def is_time(text: object) -> bool:
    return not isinstance(text, str) or TIME.fullmatch(text) is not None


@formats.checks("date-time", ValueError)
def is_date_time(text: object) -> bool:
    return not isinstance(text, str) or (text[10] in "tT" and is_date(text[:10]) and is_time(text[11:]))


@cache
def tokenizer_json() -> str:
    return load_tokenizer(PromptAssets.from_directory(resolve_model("demo")).files).tokenizer.to_str()


class Outputs:
    """What an engine makes of schemas, several at a time."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(PromptAssets.from_directory(resolve_model("demo")).files).tokenizer
        size = self._tokenizer.get_vocab_size()
        eos = tuple(token for token in range(size) if self._tokenizer.id_to_token(token) == "<|im_end|>")
        ends = [token for token in range(size) if self._tokenizer.decode([token]) in ('"', "}", "]", '"}', "0", ",")]
        runner = RandomRunner(size, [*ends, *eos])
        self._engine = Engine(
            EngineSettings(model="random", max_num_seqs=32),
            runner,
            eos,
            4096,
            "revision",
            grammars=GrammarCompiler(tokenizer_json, size, eos),
        )

    def of(self, schemas: list[Graded], seeds: int) -> dict[tuple[str, int], str | None]:
        """By name and seed: the text; None: it was cut."""
        tokens: dict[str, list[int]] = {}
        names: dict[str, tuple[str, int]] = {}
        found: dict[tuple[str, int], str | None] = {}
        for graded in schemas:
            sampling = SamplingParams(max_tokens=MAX_TOKENS, grammar=of_json_schema(graded.schema, strict=True))
            for seed in range(seeds):
                request_id = f"{graded.name}-{seed}"
                names[request_id], tokens[request_id] = (graded.name, seed), []
                self._engine.add(
                    Request(request_id=request_id, prompt_token_ids=[1, 2], sampling=sampling, noise_seed=seed)
                )
        while self._engine.has_work:
            for output in self._engine.step():
                assert output.finish_reason != "error", (output.request_id, output.error)
                made = tokens[output.request_id]
                made += output.token_ids
                if output.finish_reason is not None:
                    text = self._tokenizer.decode(made if output.ends_in_text else made[:-1], skip_special_tokens=False)
                    found[names[output.request_id]] = text if output.finish_reason == "stop" else None
        return found


def check(schemas: list[Graded], seeds: int) -> Counter[int]:
    """Every output that came to its end validates. Such outputs by level."""
    found = Outputs().of(schemas, seeds)
    completed: Counter[int] = Counter()
    for graded in schemas:
        validator = jsonschema.Draft202012Validator(graded.schema, format_checker=formats)
        for seed in range(seeds):
            text = found[graded.name, seed]
            if text is None:
                continue
            try:
                validator.validate(json.loads(text, parse_float=Decimal))  # as floats, 2.0…01 would be 2
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"{graded.name}, seed {seed}: {str(error)[:500]}\n{text}") from None
            completed[graded.level] += 1
    return completed


def test_generated_schemas_cover_all_kinds_and_are_enforceable() -> None:
    schemas = graded_schemas(300)
    used: Counter[str] = Counter()
    checker = GrammarChecker(tokenizer_json)
    for graded in schemas:
        jsonschema.Draft202012Validator.check_schema(graded.schema)
        checker.check(of_json_schema(graded.schema, strict=True))
        used.update(set(features_of(graded.schema)))
    expected = {
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "prefixItems",
        "patternProperties",
        "format",
        "pattern",
        "multipleOf",
    }
    assert all(used[keyword] >= 5 for keyword in expected), used


def test_outputs_of_thirty_schemas_validate() -> None:
    completed = check(graded_schemas(30), seeds=1)
    assert sum(completed.values()) >= 20, completed


@pytest.mark.schemas
@pytest.mark.timeout(1200)
def test_outputs_of_all_schemas_validate() -> None:
    completed = check(graded_schemas(300), seeds=4)
    assert len(completed) == LEVELS
    assert sum(completed.values()) >= 900, completed
