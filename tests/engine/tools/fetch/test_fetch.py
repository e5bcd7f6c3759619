"""`mini-infer fetch`: folders and web servers as sources, hashes, interruptions, and what peers may not do."""

import hashlib
import json
import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mini_infer_engine.tools.fetch.command import main, printing
from mini_infer_engine.tools.fetch.fill import fill
from mini_infer_engine.tools.fetch.manifest import MANIFEST_NAME, FetchError, parse_manifest, read_manifest
from mini_infer_engine.tools.fetch.progress_server import ProgressServer
from mini_infer_engine.tools.fetch.source_files import SourceFile
from mini_infer_engine.tools.fetch.sources import FolderSource, source_of
from mini_infer_engine.tools.fetch.wait import wait_until_complete

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
    "model-1.safetensors": bytes(range(256)) * 64,
    "model-2.safetensors": b"\x01" * 5000,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, contents in FILES.items():
        (folder / name).write_bytes(contents)
    (folder / "pytorch_model.bin").write_bytes(b"not taken")
    return folder


@pytest.fixture
def url(source: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(source))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def contents_of(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != MANIFEST_NAME and f.name[0] != "."}


@pytest.mark.parametrize("kind", ["folder", "file", "web"])
def test_the_folder_is_complete_and_verifies_when_a_model_was_fetched(
    tmp_path: Path, source: Path, url: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = {"folder": str(source), "file": f"file://{source}", "web": url}[kind]
    target = tmp_path / "target"
    assert main([uri, str(target)]) == 0
    assert contents_of(target) == FILES
    manifest = read_manifest(target)
    assert manifest is not None
    assert manifest.source == uri
    assert {name: record.sha256 for name, record in manifest.files.items()} == {
        name: hashlib.sha256(contents).hexdigest() for name, contents in FILES.items()
    }
    assert main(["--verify", str(target)]) == 0
    assert f"verified: {len(FILES)} files" in capsys.readouterr().out


def test_nothing_is_read_from_the_source_when_the_folder_is_complete(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    assert main([str(source), str(target)]) == 0
    for file in source.iterdir():
        file.unlink()
    assert main([str(source), str(target)]) == 0
    assert contents_of(target) == FILES


def test_a_damaged_file_is_named_when_the_folder_is_verified(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    assert main([str(source), str(target)]) == 0
    (target / "model-2.safetensors").write_bytes(b"\x02" * 5000)
    assert main(["--verify", str(target)]) == 1
    assert "model-2.safetensors has SHA-256" in capsys.readouterr().err
    (target / "model-2.safetensors").write_bytes(b"short")
    assert main([str(source), str(target)]) == 1
    assert "model-2.safetensors" in capsys.readouterr().err


def test_a_file_is_refused_when_its_hash_is_not_that_of_the_sources_manifest(
    tmp_path: Path, source: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), str(tmp_path / "first")]) == 0
    (source / MANIFEST_NAME).write_text((tmp_path / "first" / MANIFEST_NAME).read_text())
    assert main([url, str(tmp_path / "good")]) == 0
    (source / "model-1.safetensors").write_bytes(bytes(256 * 64))
    target = tmp_path / "target"
    assert main([url, str(target)]) == 1
    assert "changed or damaged" in capsys.readouterr().err
    assert not (target / MANIFEST_NAME).exists()
    assert not (target / "model-1.safetensors").exists()


class _Breaking(FolderSource):
    """A folder of which one file breaks off."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        self.name, self.read = name, list[str]()

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the contents, and fails in the middle of the named file."""
        self.read.append(name)
        if name == self.name:
            yield b"\x01" * 100
            raise FetchError("broke off")
        yield from super().chunks(name)


def test_only_missing_files_are_copied_when_an_interrupted_fetch_goes_on(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    breaking = _Breaking(source, "model-2.safetensors")
    with pytest.raises(FetchError, match="broke off"):
        fill(target, str(source), breaking, lambda done, total: None)
    assert read_manifest(target) is None
    assert not list(target.glob("*.partial"))
    again = _Breaking(source, "none")
    seen: list[tuple[int, int | None]] = []
    manifest = fill(target, str(source), again, lambda done, total: seen.append((done, total)))
    assert set(again.read) == set(FILES) - (set(breaking.read) - {breaking.name})
    assert contents_of(target) == FILES
    total = sum(map(len, FILES.values()))
    assert manifest.total_bytes == total
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_model_is_copied_once_when_several_processes_fetch_into_one_folder(tmp_path: Path, source: Path) -> None:
    target, readers = tmp_path / "target", [_Breaking(source, "none") for _ in range(4)]
    threads = [
        threading.Thread(target=fill, args=(target, str(source), reader, lambda done, total: None))
        for reader in readers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(reader.read) for reader in readers) == [0, 0, 0, len(FILES)]
    assert contents_of(target) == FILES


class _Lying(FolderSource):
    """A folder whose files are larger than it says."""

    def files(self) -> list[SourceFile]:
        """Returns the files, each a byte shorter than it is."""
        return [SourceFile(file.name, (file.size or 1) - 1) for file in super().files()]


def test_a_file_is_refused_when_it_has_another_size_than_was_announced(tmp_path: Path, source: Path) -> None:
    with pytest.raises(FetchError, match=r"config\.json"):
        fill(tmp_path / "target", "x", _Lying(source), lambda done, total: None)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "", "a\\b", MANIFEST_NAME, 7, "a\0b"])
def test_a_manifest_is_refused_when_it_names_a_file_outside_the_folder(name: object) -> None:
    record = {"size": 1, "sha256": "0" * 64}
    text = json.dumps({"source": "x", "files": [[name, record]] if name == 7 else {str(name): record}})
    with pytest.raises(FetchError, match="here"):
        parse_manifest(text, "here")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"source": "x", "files": {}}', '{"source": 1, "files": {"a": {"size": 1, "sha256": "x"}}}']
    + [f'{{"source": "x", "files": {{"a": {{"size": {size}, "sha256": "{"0" * 64}"}}}}}}' for size in ("-1", '"1"')],
)
def test_a_manifest_is_refused_when_it_has_another_form(text: str) -> None:
    with pytest.raises(FetchError, match="here"):
        parse_manifest(text, "here")


def test_shards_are_refused_when_the_servers_index_leaves_the_folder(source: Path, url: str) -> None:
    index = {"weight_map": {"a": "../../etc/shadow"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FetchError, match="shadow"):
        source_of(url).files()


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("config.json", "config.json"),
        ("model-2.safetensors", "model-2"),
        ("model.safetensors.index.json", MANIFEST_NAME),
    ],
)
def test_the_missing_file_is_named_when_a_server_lacks_one(
    tmp_path: Path, source: Path, url: str, capsys: pytest.CaptureFixture[str], missing: str, named: str
) -> None:
    (source / missing).unlink()
    assert main([url, str(tmp_path / "target")]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("uri", "remedy"),
    [
        ("az://bucket/model", "s3:// or gs:// address"),
        ("hf://a/b", "hf download"),
        ("oci://a/b:1", "spec.model.uri"),
        ("ftp://host/x", "http"),
        ("/not/there", "no such folder"),
        ("http://127.0.0.1:1/x", "127.0.0.1:1"),
    ],
)
def test_the_remedy_is_named_when_a_source_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], uri: str, remedy: str
) -> None:
    assert main([uri, str(tmp_path / "target")]) == 1
    assert remedy in capsys.readouterr().err


def test_another_model_is_refused_when_the_folder_has_one(
    tmp_path: Path, source: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    assert main([str(source), str(target)]) == 0
    assert main([url, str(target)]) == 1
    assert str(source) in capsys.readouterr().err


def test_bytes_and_per_cent_are_printed_when_seconds_have_passed(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    progress = printing(lambda: next(times))
    for done in (10, 50, 60):
        progress(done, 200)
    progress(100, None)
    assert capsys.readouterr().out.splitlines() == ["50 of 200 (25%) bytes", "100 bytes"]


@pytest.mark.parametrize("arguments", [["only-one"], ["--verify", "a", "b"]])
def test_the_usage_is_printed_when_arguments_do_not_go_together(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "--verify" in capsys.readouterr().err


def test_others_are_deleted_when_no_service_uses_them(tmp_path: Path, source: Path) -> None:
    volume = tmp_path / "volume"
    for name in ("a" * 16, "b" * 16, "c" * 16, "notes", "d" * 15):
        (volume / name).mkdir(parents=True)
        (volume / name / "model.safetensors").write_bytes(b"x")
    target = volume / ("c" * 16)
    arguments = [str(source), str(target), "--prune", f"--keep={'a' * 16}"]
    (target / "model.safetensors").unlink()
    assert main(arguments) == 0
    assert {folder.name for folder in volume.iterdir()} == {"a" * 16, "c" * 16, "notes", "d" * 15}
    assert contents_of(target) == FILES


def test_a_process_waits_when_another_one_fills_the_folder(tmp_path: Path, source: Path) -> None:
    target, slept = tmp_path / "target", list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            assert main([str(source), str(target)]) == 0

    manifest = wait_until_complete(target, sleep)
    assert len(slept) == 2
    assert set(manifest.files) == set(FILES)
    assert main(["--await", str(target)]) == 0
    (target / "model-1.safetensors").unlink()
    with pytest.raises(FetchError, match="model-1"):
        wait_until_complete(target, sleep)


def test_the_port_answers_bytes_when_progress_is_reported() -> None:
    with ProgressServer(0) as server:
        address = f"http://127.0.0.1:{server.port}"
        server.report(50, 200)
        with urllib.request.urlopen(f"{address}/progress", timeout=60) as answer:
            assert json.load(answer) == {"bytes": 50, "total_bytes": 200}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/", timeout=60)
    with pytest.raises(FetchError, match="--progress-port"):
        ProgressServer(70_000)


def test_an_unused_model_is_deleted_when_a_copy_needs_its_room(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used, target = tmp_path / ("0" * 16), tmp_path / ("f" * 16)
    used.mkdir()
    (used / MANIFEST_NAME).write_text("{}")
    os.utime(used / MANIFEST_NAME, (1.0, 1.0))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0) if used.exists() else usage)
    assert main([str(source), str(target)]) == 1
    assert "0 are free" in capsys.readouterr().err
    assert main([str(source), str(target), "--make-room"]) == 0
    assert f"deleted {used.name}, to make room" in capsys.readouterr().out
    os.utime(target / MANIFEST_NAME, (1.0, 1.0))
    assert main([str(source), str(target), "--make-room"]) == 0
    assert (target / MANIFEST_NAME).stat().st_mtime > 1.0, "a pod that finds the model uses it"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://[::1/x", "write http(s)://host/path"),
        ("http://host:99999/x", "write http(s)://host/path"),
        ("https://", "it names no host"),
        ("https://user:secret@host/x", "addresses with user:password@ are not read"),
        ("https://user:secret@host:x/y", "write http(s)://host/path"),
        ("https://host/x?sig=1", "leave out what begins with ? or #"),
    ],
)
def test_an_address_is_refused_without_its_password_when_nothing_can_be_read_below_it(address: str, words: str) -> None:
    with pytest.raises(FetchError) as error:
        source_of(address)
    assert words in str(error.value)
    assert "secret" not in str(error.value)
