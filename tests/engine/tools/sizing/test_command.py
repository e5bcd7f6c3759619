"""`mini-infer size` from its flags to the service that it prints, which the operator's own rules accept."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.common.models import model_folder
from mini_infer_engine.tools.sizing.command import build_parser, main
from mini_infer_operator.parse import parse_service

LOAD = ["--gpu", "h200", "--ttft", "500", "--itl", "15", "--rate", "40"]


def test_a_valid_service_is_printed_when_the_targets_can_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder("qwen2.5-7b", tmp_path)
    assert main(["--model", folder, *LOAD, "--uri", "pvc://models/qwen"]) == 0
    printed = capsys.readouterr().out
    service = parse_service(yaml.safe_load(printed))
    assert service.metadata.name == "qwen2-5-7b"
    assert service.spec.model.uri == "pvc://models/qwen"
    assert service.spec.unified is not None
    assert service.spec.unified.replicas > 1
    comments = [line for line in printed.splitlines() if line.startswith("# ")]
    assert any("KV cache" in line for line in comments)
    assert any("One engine serves up to" in line for line in comments)


def test_main_memory_is_counted_when_the_prefix_cache_gets_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder("qwen2.5-7b", tmp_path)
    for size, quantity in (("64GiB", "64Gi"), ("1536MiB", "1536Mi")):
        assert main(["--model", folder, *LOAD, "--kv-host-memory", size]) == 0
        printed = capsys.readouterr().out
        service = parse_service(yaml.safe_load(printed))
        assert service.spec.kv_cache is not None
        assert service.spec.kv_cache.host == quantity
    tokens = (1536 << 20) // (28 * 2 * 4 * 128 * 2)  # layers, keys and values, heads, their width, bf16
    assert f"{tokens:,} tokens more" in printed
    assert main(["--model", folder, *LOAD]) == 0
    assert "kvCache" not in yaml.safe_load(capsys.readouterr().out)["spec"]


def test_parallelism_and_gpus_agree_when_one_gpu_is_too_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder("qwen3-14b", tmp_path)
    assert main(["--model", folder, "--gpu", "H200", "--ttft", "500", "--itl", "5", "--rate", "1"]) == 0
    role = yaml.safe_load(capsys.readouterr().out)["spec"]["unified"]
    assert role["parallelism"]["tensor"] == role["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_weights_take_less_time_and_memory_when_they_are_quantised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder("qwen3-14b", tmp_path)
    arguments = ["--model", folder, "--gpu", "H100", "--ttft", "500", "--itl", "9", "--rate", "1"]
    assert main(arguments) == 0
    plain = yaml.safe_load(capsys.readouterr().out)["spec"]["unified"]
    assert main([*arguments, "--quantization", "fp8"]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    parse_service(document)
    quantised = document["spec"]["unified"]
    assert plain["parallelism"] == {"tensor": 2}
    assert "quantization" not in plain["engine"]
    assert "parallelism" not in quantised, "one GPU is enough"
    assert quantised["engine"]["quantization"] == "fp8"


def test_reason_and_remedy_are_printed_when_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder("qwen2.5-7b", tmp_path)
    assert main(["--model", folder, "--gpu", "H200", "--ttft", "5", "--itl", "1", "--rate", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "8 GPUs" not in printed.err, "28 heads are not shared by 8"
    assert "What fits: --ttft" in printed.err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantised"),
        ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}, "sliding windows"),
    ],
)
def test_the_model_is_refused_when_its_passes_are_not_modelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], named: str
) -> None:
    file = Path(model_folder("qwen2.5-7b", tmp_path)) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert main(["--model", str(file.parent), *LOAD]) == 2
    assert named in capsys.readouterr().err


def test_experts_are_refused_when_the_time_of_their_passes_is_not_modelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", model_folder("qwen3-30b-a3b", tmp_path), *LOAD]) == 2
    assert "Qwen3MoeForCausalLM" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gpu", "A100"], "A100"),
        (["--rate", "0"], "--rate"),
        (["--ttft", "soon"], "--ttft"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--cached-tokens", "5000"], "--cached-tokens"),
    ],
)
def test_the_flag_is_named_when_its_value_makes_no_sense(
    capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--model", "demo", *LOAD, *flags])
    assert named in capsys.readouterr().err


def test_the_help_has_an_example_when_it_is_printed() -> None:
    assert "mini-infer size --model Qwen/Qwen2.5-7B-Instruct --gpu H200" in build_parser().format_help()


@pytest.mark.parametrize("name", ["A", "a_b", "1a", "a-", "a" * 41, "", "\u00e9"])
def test_a_name_is_refused_when_the_resource_cannot_have_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "demo", "--gpu", "H200", "--ttft", "200", "--itl", "20", "--rate", "1"]
    with pytest.raises(SystemExit):
        main([*options, "--name", name])
    assert "is no name of a service" in capsys.readouterr().err
