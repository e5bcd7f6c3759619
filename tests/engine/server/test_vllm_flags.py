import argparse
import json
from functools import cache

import pytest

from mini_infer_engine.offline.vllm_keywords import _NEUTRAL, SEVERAL, SWITCHES
from mini_infer_engine.server.cli import main, make_parser
from mini_infer_engine.server.vllm_flags import split_flags, vllm_flags


def read(words: list[str]) -> tuple[str, list[str]]:
    """The model that a command line names, and the flags without effect."""
    parser = _parser()
    own, vllms = split_flags(words, parser)
    options, others = parser.parse_known_args(own)
    assert options.MODEL is None or options.model is None, "the model is named once"
    model = options.model or options.MODEL
    return model, vllm_flags([*others, *vllms], parser, model)


@cache
def _parser() -> argparse.ArgumentParser:
    """Returns the one parser of these tests: to make one takes most of the time of reading a command line."""
    return make_parser()


def passed(words: str) -> list[str]:
    return read(["demo", *words.split()])[1]


def neutral_value(name: str) -> str:
    """A value of vLLM's flag that asks for nothing, as a command line has it."""
    values = [value for value in _NEUTRAL[name] if value is not None and value is not False and value != ""] or ["1"]
    return json.dumps(values[0]) if isinstance(values[0], dict | list) else str(values[0])


@pytest.mark.parametrize("name", sorted(_NEUTRAL))
def test_a_neutral_vllm_flag_is_accepted_in_each_spelling(name: str) -> None:
    dashed = name.replace("_", "-")
    is_off = name in SWITCHES and _NEUTRAL[name][:1] != () and True not in _NEUTRAL[name]
    if is_off and _NEUTRAL[name]:
        forms = [[f"--no-{dashed}"], [f"--no_{name}"]]
    elif name in SWITCHES:
        forms = [[f"--{dashed}"], [f"--{name}"], [f"--{dashed}", "true"]]
    elif None in _NEUTRAL[name] and all(not value for value in _NEUTRAL[name]):
        forms = [[f"--{dashed}", "None"], [f"--{dashed}=None"], [f"--{name}", "None"]]
    else:
        value = neutral_value(name)
        forms = [[f"--{dashed}", value], [f"--{dashed}={value}"], [f"--{name}", value]]
    lines = [line for form in forms for line in placed(form)]
    for line in lines:
        model, without_effect = read(line)
        assert model == "demo", line
        assert len(without_effect) == 1, line


def placed(form: list[str]) -> list[list[str]]:
    named = ["--model", "demo"]
    lines = [["demo", *form], ["serve", "demo", *form], [*named, *form], [*form, *named], [*form, "--model=demo"]]
    several = form[0].removeprefix("--").replace("-", "_") in SEVERAL and len(form) > 1
    return lines if several else [*lines, [*form, "demo"], ["--port", "0", *form, "--dtype", "auto", "demo"]]


@pytest.mark.parametrize(
    "words",
    [
        "-O3 --model demo",
        "-O 3 --model demo",
        "--compilation-config.mode 3 demo",
        "-cc.mode=3 demo",
        "--hf-overrides {} --max_model_len 100 demo",
        "--max_num_seqs=5 --gpu_memory_utilization 0.5 --swap_space 4 demo",
        "serve demo --served_model_name a b",
    ],
)
def test_vllms_spellings_of_flags_are_parsed(words: str) -> None:
    assert read(words.split())[0] == "demo"


@pytest.mark.parametrize(
    ("words", "without_effect"),
    [
        ("--port 0 --enforce-eager", []),
        ("--trust-remote-code --port 0", []),
        ("--swap-space 8 --disable-log-requests", ["--swap-space 8", "--disable-log-requests"]),
        ("--tokenizer demo --tokenizer-mode=auto", ["--tokenizer demo", "--tokenizer-mode auto"]),
        ("--no-enable-log-requests --enable-chunked-prefill", ["--no-enable-log-requests", "--enable-chunked-prefill"]),
        ("--cuda-graph-sizes 1 2 4 --hf-overrides {}", ["--cuda-graph-sizes 1 2 4"]),
        ("--cpu-offload-gb 0 --block-size 32", ["--cpu-offload-gb 0"]),
    ],
)
def test_vllm_flags_are_accepted_when_they_have_no_effect(words: str, without_effect: list[str]) -> None:
    assert passed(words) == without_effect


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-model-lenn 5", "there is no flag --max-model-lenn: did you mean --max-model-len?"),
        ("--magic", "there is no flag --magic: --help lists all flags"),
        ("-Z3", "there is no flag -Z3"),
        ("--hf-overrides.rope_theta 5", "--hf-overrides.rope_theta"),
        ("--enable-lora", "--enable-lora = True is not supported: leave it out"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill = False is not supported"),
        ("--tokenizer other", "put tokenizer.json there"),
        ("--uds /tmp/socket", "--uds is vLLM's, and not here"),
        ("--disable-uvicorn-access-log", "it is --no-access-log"),
        ("another", "'another' is one word too many"),
    ],
)
def test_an_unsupported_vllm_flag_is_named_with_a_remedy(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["demo", *words.split()])
    reported = capsys.readouterr().err
    assert message in reported
    assert len(reported.splitlines()) <= 3
