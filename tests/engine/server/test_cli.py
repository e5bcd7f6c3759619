import argparse
import re
import subprocess
import sys
import tomllib

import pytest

import mini_infer_engine
from mini_infer_engine.config.options.flags import byte_size, options_from
from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.server.cli import main, make_parser, settings_from
from tests.engine.server.dry_server import ROOT


def test_every_engine_setting_has_a_flag_with_the_same_default() -> None:
    parsed = settings_from(make_parser().parse_args(["--model", "m"]))
    assert parsed == EngineSettings(model="m")
    assert options_from(make_parser().parse_args([]), ServerOptions) == ServerOptions()


def test_the_model_is_given_by_position_or_by_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_parser().parse_args(["demo", "--port", "0"]).MODEL == "demo"
    for wrong in (["one", "--model", "two"], []):
        with pytest.raises(SystemExit):
            main(wrong)
        reported = capsys.readouterr().err
        assert len(reported.splitlines()) <= 3, "a long usage hides what is wrong"
        assert "mini-infer-serve: error:" in reported


def test_help_gives_meaning_unit_and_default_of_every_flag() -> None:
    for action in make_parser()._actions:
        if action.dest in ("help", "version"):
            continue
        name = action.option_strings[0] if action.option_strings else action.dest
        assert action.help, name
        assert "default" in action.help, name
        assert action.type is None or action.metavar or action.choices, f"{name} has no unit"
        if isinstance(action.default, (int, float)) and not isinstance(action.default, bool) and action.default < 10**6:
            assert re.search(rf"\b{action.default:g}\b", action.help), f"{name}: its default is {action.default}"
        elif isinstance(action.default, str):
            assert action.default in action.help, f"{name}: its default is {action.default}"


def test_the_flag_is_named_when_an_option_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--speculative-method", "head"])
    assert "error: --speculative-method is head, which needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--kv-disk-size", "1GB"], "--kv-disk-path and --kv-disk-size go together"),
        (["--kv-host-path", "/dev/shm/x"], "--kv-host-path is where --kv-host-memory lies"),
        (["--kv-policy", "snapkv"], "--kv-policy snapkv: kv_budget is missing"),
        (["--kv-selection-budget", "64"], "--kv-selection-budget goes with --kv-selection quest"),
        (["--kv-host-memory", "9" * 400], "argument --kv-host-memory: '99"),
        (["--kv-host-memory", "0.5"], "argument --kv-host-memory: '0.5' is no size"),
    ],
)
def test_a_flag_has_its_two_dashes_in_the_error_when_options_of_the_kv_cache_are_wrong(
    flags: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["demo", *flags])
    assert f"mini-infer-serve: error: {fault}" in capsys.readouterr().err


def test_server_flags_become_settings() -> None:
    flags = "--model m --served-model-name a b --kv-cache-memory 512MiB --no-enable-prefix-caching --step-depth 0"
    settings = settings_from(make_parser().parse_args(flags.split()))
    assert settings.served_model_name == ("a", "b")
    assert settings.kv_cache_memory == 512 * 2**20
    assert not settings.enable_prefix_caching
    assert settings.step_depth == 0


def test_disable_accepts_the_mechanisms_that_help_lists(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser()
    assert settings_from(parser.parse_args(["--model", "m", "--disable", "pdl,split_kv"])).disable == (
        "pdl",
        "split_kv",
    )
    described = parser.format_help()
    for mechanism in Mechanism:
        assert f"  {mechanism} " in described
        assert "; off: " in mechanism.description, f"{mechanism}: what runs in its place?"
    with pytest.raises(SystemExit):
        main(["--model", "m", "--disable", "stream-k"])
    assert "no mechanism 'stream-k': did you mean 'stream_k'?" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no mechanism 'magic'"):
        EngineSettings(model="m", disable=("magic",))


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 10**9), ("512MiB", 2**29), ("1.5g", 15 * 10**8), ("1024", 1024), ("4 KiB", 4096), ("7b", 7)],
)
def test_byte_sizes_are_parsed(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize(
    ("text", "tokens"), [("8k", 8000), ("25.6k", 25_600), ("8K", 8192), ("1M", 2**20), ("4096", 4096), ("auto", None)]
)
def test_max_model_len_accepts_vllms_suffixes(text: str, tokens: int | None) -> None:
    assert settings_from(make_parser().parse_args(["--model", "m", "--max-model-len", text])).max_model_len == tokens


@pytest.mark.parametrize("text", ["", "2 apples", "-1", "GB", "1e9"])
def test_a_text_is_refused_when_it_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no size"):
        byte_size(text)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--model", "m", "--nonsense"],
        ["--model", "m", "--max-model", "5"],
        ["--model", "m", "--role", "both"],
        ["--model", "m", "--port", "70000"],
        ["--model", "m", "--max-num-seqs", "0"],
        ["--model", "m", "--kv-cache-memory", "0"],
        ["--model", "m", "--max-model-len", "8.5K"],
        ["--model", "m", "--page-size", "k"],
        ["--model", "m", "--dtype", "half"],
        ["--model", "m", "--quantization", "awq"],
        ["--model", "m", "--gpu-memory-utilization", "1.5"],
        ["--model", "m", "--dry-run"],
        ["--model", "m", "--disable", "pdl,magic"],
    ],
)
def test_the_server_exits_with_2_when_a_flag_is_invalid(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert "mini-infer-serve: error:" in capsys.readouterr().err


def test_version_prints_project_version_and_active_kernels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert mini_infer_engine.__version__ == project["version"]
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    version, kernels = capsys.readouterr().out.splitlines()
    assert version == project["version"]
    assert kernels.startswith("kernels: ")


def test_the_http_process_imports_neither_numpy_nor_torch() -> None:
    """Both would be a noticeable part of its start."""
    imports = "import sys, mini_infer_engine.server.cli, mini_infer_engine.server.serve"
    code = f"{imports}; print(*{{'numpy', 'torch'}} & {{*sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_templates_and_tokenizers_are_imported_after_the_core_process_began() -> None:
    """What is imported before delays the core process, whose start takes longest."""
    code = "import sys, mini_infer_engine.server.cli; print(*{'jinja2', 'tokenizers'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
