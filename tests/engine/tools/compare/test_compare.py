"""mini-infer-compare: its figures are those of the logits, and what it cannot do is said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from mini_infer_engine import __version__
from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.tools.compare.cli import main
from mini_infer_engine.tools.compare.measure import Baseline, precision
from mini_infer_engine.tools.compare.report import draw, table
from mini_infer_engine.tools.compare.texts import Text, demo_texts, read_texts
from tests.engine.server.dry_server import environment
from tests.support.tiny_models import reference_logits, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
COUNTS = [position % 3 != 0 for position in range(39)]


def test_compare_figures_equal_those_of_the_counted_predictions(tmp_path: Path) -> None:
    model, baseline = save_tiny_model(tmp_path, "qwen3"), Baseline()
    texts = [Text(TOKENS, COUNTS), Text(TOKENS[:20], [True] * 19)]
    same = [precision(tiny_runner(tmp_path), texts, baseline) for _ in range(2)]
    surprises = torch.cat(
        [
            -reference_logits(model, text.tokens)[:-1].log_softmax(-1)
            .gather(1, torch.tensor(text.tokens[1:])[:, None])[torch.tensor(text.counts)]
            for text in texts
        ]
    )  # fmt: skip
    for figures in same:
        assert figures["perplexity"] == pytest.approx(float(surprises.mean().exp()), rel=1e-3)
        assert figures["top-1 agreement"] == 1.0
        assert figures["KL nats"] < 1e-3
    rounded = precision(tiny_runner(tmp_path, quantization="int4"), texts, baseline)
    assert rounded["top-1 agreement"] < 1.0
    assert rounded["KL nats"] > 1e-2


def test_compare_prints_and_writes_figures_of_each_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(Path(__file__).read_text()[:1500])
    flags = ["--device", "cpu", "--texts", str(text), "--limit", "1", "--schemes", "bf16,fp8", "--json", str(out)]
    flags += ["--kv", "int8"]
    assert main(flags) == 0
    figures = json.loads(out.read_text())["figures"]
    assert figures["fp32"]["top-1 agreement"] == 1.0
    assert 0.5 < figures["fp8"]["top-1 agreement"] <= 1.0
    assert figures["fp8"]["TTFT ms"] > 0
    assert list(figures) == ["fp32", "fp32, KV int8", "fp8", "fp8, KV int8"]
    assert figures["fp32, KV int8"]["KV bytes/token"] < 0.27 * figures["fp32"]["KV bytes/token"]  # of fp32
    assert 0.5 < figures["fp32, KV int8"]["top-1 agreement"] <= 1.0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--schemes", "int3"], "int3: it is none of bf16"),
        (["--kv", "int4"], "--kv int4: it is none of fp8"),
        (["--schemes", ""], "--schemes : it is none of bf16"),
        (["--texts", "no/such/file"], "no/such/file"),
    ],
)
def test_compare_exits_with_the_reason_when_it_cannot_run(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", *flags]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--json", "no/such/folder/out.json"],
            "--json no/such/folder/out.json: name a file in a folder that there is",
        ),
        (["--json", "."], "--json .: name a file"),
        (["--plot", "no/such/folder/out.png"], "--plot no/such/folder/out.png: name a file"),
        (["--plot", "out.xyz"], "--plot out.xyz: its name must end in one of"),
    ],
)
def test_compare_exits_before_measuring_when_its_output_cannot_be_written(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in flags:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr("mini_infer_engine.tools.compare.cli.compare", None)
    with pytest.raises(SystemExit):
        main(flags)
    assert words in capsys.readouterr().err


def test_compare_texts_have_a_limited_length() -> None:
    texts = read_texts(DEMO_DIRECTORY, None, 3)
    assert len(texts) == 3
    assert all(len(text.counts) == len(text.tokens) - 1 <= 511 for text in texts)


def test_demo_questions_are_found_from_any_folder(tmp_path: Path) -> None:
    """By the console script, too, whose path has no current folder."""
    code = "from mini_infer_engine.tools.compare.texts import demo_texts; print(demo_texts(1) is not None)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_demo_questions_cover_names_and_skills() -> None:
    """Each sort as many as texts; the texts' own answers are right, and no answer is none."""
    found = demo_texts(4)
    assert found is not None
    texts, sorts = found
    names, skills = sorts
    assert (names.figure, skills.figure) == ("answers right", "skills right")
    assert len(texts) == len(names.prompts) == len(skills.prompts) == 4
    decode = Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json")).decode
    assert (
        names.judge(
            [decode(text.tokens[len(requested) :]) for text, requested in zip(texts, names.prompts, strict=True)]
        )
        == 1
    )
    assert names.judge([""] * 4) == skills.judge([""] * 4) == 0


def test_table_and_plot_have_every_figure(tmp_path: Path) -> None:
    figures = {
        "bf16": {"perplexity": 12.34567, "top-1 agreement": 1.0},
        "int4": {"perplexity": 13.0, "tokens/s": 12345.6},
    }
    lines = table(figures).splitlines()
    assert lines[0].split() == ["bf16", "int4"]
    assert lines[1].split() == ["perplexity", "12.35", "13"]
    assert lines[2].split() == ["top-1", "agreement", "100.00%", "-"]
    assert lines[3].split() == ["tokens/s", "-", "12,346"]
    pytest.importorskip("matplotlib", reason="draws the picture")
    draw(figures, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_compare_ends_without_traceback_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mini_infer_engine.tools.compare.cli.compare", interrupted)
    assert main([]) == 130


def test_compare_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"mini-infer-compare {__version__}\n")
