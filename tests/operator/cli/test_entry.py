import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mini_infer_operator import cli

ROOT = Path(__file__).parents[3]
DEMO = str(ROOT / "examples" / "demo.yaml")


def test_plan_prints_manifests_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "-f", DEMO]) == 0
    output = capsys.readouterr()
    assert [m["kind"] for m in yaml.safe_load_all(output.out)] == [
        *("Service", "Service", "PodDisruptionBudget", "ControllerRevision", "Deployment")
    ]
    assert "default/demo: 2 x unified, model demo, image mini-infer-engine-cpu:" in output.err
    assert cli.main(["plan", "-f", DEMO, "-o", "json", "--engine-image", "x:1"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert items[-1]["spec"]["template"]["spec"]["containers"][0]["image"] == "x:1"


def test_plan_names_the_fields_when_a_preset_sets_them(capsys: pytest.CaptureFixture[str]) -> None:
    presets = ROOT / "examples" / "presets"
    assert cli.main(["plan", "-f", str(presets / "service.yaml"), "--presets", str(presets)]) == 0
    output = capsys.readouterr()
    assert (
        "default/llama-8b: InferencePreset llama-3.1-8b-h200 sets unified.engine.gpuMemoryUtilization, " in output.err
    )
    (deployment,) = [m for m in yaml.safe_load_all(output.out) if m["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--quantization=fp8" in container["args"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert cli.main(["plan", "-f", str(presets / "service.yaml")]) == 0
    assert "--quantization=fp8" not in capsys.readouterr().out


def test_plan_says_so_when_a_file_of_presets_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "presets.yaml"
    path.write_text("kind: InferencePreset\nspec: {engin: {}}\n")
    assert cli.main(["plan", "-f", DEMO, "--presets", str(path)]) == 2
    assert "spec.engin: there is no such field" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not YAML"),
        ("", "holds no InferenceService (it is empty)"),
        ("kind: InferenceService\nkind: Other\n", "key 'kind' stands twice"),
        ("kind: InferenceService\nspec: {model: {uri: demo}}\n", "metadata: is missing"),
        (
            "kind: InferenceService\nspec: {unified: {template: {metadata: {labels: {a: y}}}}}\n",
            "spec.unified.template.metadata.labels.a: Input should be a valid string, not true",
        ),
        ("kind: InferenceService\nmetadata: {name: a}\nspec: {modell: 1}\n", "spec.modell: there is no such field"),
    ],
)
def test_plan_names_the_fault_when_the_resource_is_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "cr.yaml"
    path.write_text(text)
    assert cli.main(["plan", "-f", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_the_error_names_the_file_when_it_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "-f", "/no/cr.yaml"]) == 2
    assert "/no/cr.yaml: No such file or directory" in capsys.readouterr().err


def test_chat_says_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert "is `mini-infer up` or `mini-infer-serve` running?" in capsys.readouterr().err


def test_cli_imports_no_heavy_package_when_it_prints_help() -> None:
    code = "import sys; from mini_infer_operator.cli.entry import build_parser; build_parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pydantic", "aiohttp", "yaml", "asyncio", "torch"} & set(loaded)


def test_the_commands_are_listed_when_none_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "mini-infer up -f examples/demo.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("serve", "it is a program of its own, `mini-infer-serve`"),
        ("stauts", "did you mean status?"),
        ("", "`mini-infer --help` lists them"),
        ("délete", "`mini-infer --help` lists them"),
    ],
)
def test_a_remedy_is_named_when_there_is_no_such_command(
    capsys: pytest.CaptureFixture[str], word: str, remedy: str
) -> None:
    assert cli.main([word]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mini-infer: there is no command")
    assert line.endswith(remedy)


@pytest.mark.parametrize("arguments", [["status"], ["why"], ["rollout", "restart"], ["rollout", "undo"]], ids=" ".join)
@pytest.mark.parametrize("name", ["", "..", "a/b", "../pods", "a?b", "-", "A", "é", "a" * 64])
def test_a_name_is_refused_when_it_could_be_another_path(
    capsys: pytest.CaptureFixture[str], arguments: list[str], name: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--", name])
    assert "is not a name" in capsys.readouterr().err


def test_a_namespace_is_refused_when_it_could_be_another_path(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["status", "-n", "../x"])
    assert "'../x' is not a name" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "2.1", "x"])
def test_a_temperature_is_refused_when_no_server_takes_it(capsys: pytest.CaptureFixture[str], value: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["chat", "--temperature", value])
    assert "write a number from 0 to 2" in capsys.readouterr().err
