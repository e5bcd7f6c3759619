import pytest

from mini_infer_engine.server.cli import main, make_parser
from mini_infer_engine.server.vllm_flags import vllm_flags


def passed(words: str) -> list[str]:
    parser = make_parser()
    options, others = parser.parse_known_args(["demo", *words.split()])
    return vllm_flags(others, parser, options.MODEL)


@pytest.mark.parametrize(
    ("words", "without_effect"),
    [
        ("--port 0 --enforce-eager", []),
        ("--trust-remote-code --port 0", ["--trust-remote-code"]),
        ("--swap-space 8 --disable-log-requests", ["--swap-space 8", "--disable-log-requests"]),
        ("--tokenizer demo --tokenizer-mode=auto", ["--tokenizer demo", "--tokenizer-mode auto"]),
        ("--no-enable-log-requests --enable-chunked-prefill", ["--no-enable-log-requests", "--enable-chunked-prefill"]),
        ("--cuda-graph-sizes 1 2 4 --hf-overrides {}", ["--cuda-graph-sizes 1 2 4", "--hf-overrides {}"]),
        ("--cpu-offload-gb 0 --block-size 32", ["--cpu-offload-gb 0"]),
    ],
)
def test_vllms_flags_pass_where_they_ask_for_nothing(words: str, without_effect: list[str]) -> None:
    assert passed(words) == without_effect


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-model-lenn 5", "there is no flag --max-model-lenn: did you mean --max-model-len?"),
        ("--magic", "there is no flag --magic: --help lists all flags"),
        ("-O3", "there is no flag -O3"),
        ("--enable-lora", "--enable-lora = True is not supported: leave it out"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill = False is not supported"),
        ("--tokenizer other", "put tokenizer.json there"),
        ("--uds /tmp/socket", "--uds is vLLM's, and not here"),
        ("--disable-uvicorn-access-log", "it is --no-access-log"),
        ("another", "'another' is one word too many"),
    ],
)
def test_other_flags_are_named_with_a_remedy(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", *words.split()])
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) <= 3
