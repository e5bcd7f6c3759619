"""Models in buckets, by a server on loopback: lists, ranges, retries, credentials and what is said of failures."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_infer_engine.tools.fetch import object_store
from mini_infer_engine.tools.fetch.command import main
from mini_infer_engine.tools.fetch.fill import fill
from mini_infer_engine.tools.fetch.manifest import MANIFEST_NAME, FetchError, read_manifest
from mini_infer_engine.tools.fetch.sources import source_of
from tests.engine.tools.fetch.test_fetch import FILES, contents_of
from tests.support.object_server import ObjectServer, object_server

URI = "s3://models/qwen3/8b"
CLOUD = ("AWS_", "GOOGLE_")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    folder = tmp_path / "buckets/models/qwen3/8b"
    folder.mkdir(parents=True)
    for name, contents in FILES.items():
        (folder / name).write_bytes(contents)
    for other in ("pytorch_model.bin", ".cache/x.json", "../8b-fp8/model.safetensors"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"not taken")
    with object_server(tmp_path / "buckets") as server:
        for name in [name for name in os.environ if name.startswith(CLOUD)]:
            monkeypatch.delenv(name)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_store, "PART_BYTES", 1000)
        yield server


def test_a_folder_of_a_bucket_is_copied_and_verifies(
    tmp_path: Path, server: ObjectServer, capsys: pytest.CaptureFixture[str]
) -> None:
    target, seen = tmp_path / "target", list[tuple[int, int | None]]()
    manifest = fill(target, URI, source_of(URI), lambda done, total: seen.append((done, total)))
    total = sum(map(len, FILES.values()))
    assert contents_of(target) == FILES
    assert manifest.source == URI
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert {each for _, each in seen} == {total}, "the list says how large the model is"
    assert server.requests["list"] > 1
    assert server.requests["get"] >= total / 1000
    assert main(["--verify", str(target)]) == 0
    assert "verified" in capsys.readouterr().out


def test_google_buckets_are_read_when_the_uri_says_gs(
    tmp_path: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.signed = False
    key = {
        "gcs_base_url": server.url,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    assert main(["gs://models/qwen3/8b", str(tmp_path / "target")]) == 0
    assert contents_of(tmp_path / "target") == FILES


def test_the_sources_manifest_is_kept_when_the_bucket_has_one(tmp_path: Path, server: ObjectServer) -> None:
    folder = server.root / "models/qwen3/8b"
    assert main([str(folder), str(tmp_path / "first")]) == 0
    (folder / MANIFEST_NAME).write_bytes((tmp_path / "first" / MANIFEST_NAME).read_bytes())
    (folder / "model-2.safetensors").write_bytes(b"\x02" * 5000)
    with pytest.raises(FetchError, match="SHA-256"):
        fill(tmp_path / "second", URI, source_of(URI), lambda *_: None)
    assert read_manifest(tmp_path / "second") is None


def test_a_request_is_repeated_when_the_server_is_overloaded(tmp_path: Path, server: ObjectServer) -> None:
    server.answers = [503, 500]
    assert main([URI, str(tmp_path / "target")]) == 0
    assert contents_of(tmp_path / "target") == FILES


@pytest.mark.parametrize(
    ("uri", "environment", "message"),
    [
        (URI, {"AWS_ACCESS_KEY_ID": "other"}, "403: these credentials may not list and read it"),
        (URI, {"AWS_SKIP_SIGNATURE": "true"}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("s3://absent/qwen3", {}, "404: there is no such bucket"),
        ("s3://models/absent", {}, "has no .safetensors and no .gguf file"),
        ("s3://UPPER/x", {}, "is no name of a bucket: write s3://bucket/path"),
        ("s3://", {}, "is no name of a bucket"),
        (URI, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "AWS_ENDPOINT_URL and AWS_REGION"),
    ],
)
def test_the_remedy_is_named_when_a_bucket_cannot_be_read(
    tmp_path: Path,
    server: ObjectServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    uri: str,
    environment: dict[str, str],
    message: str,
) -> None:
    monkeypatch.setattr(object_store, "_RETRIES", 1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([uri, str(tmp_path / "target")]) == 1
    found = capsys.readouterr().err
    assert uri in found
    assert message in found
    assert "Traceback" not in found


def test_missing_credentials_are_named_when_no_metadata_service_has_any(server: ObjectServer) -> None:
    source = object_store.ObjectStoreSource(URI)
    with pytest.raises(FetchError, match="AWS_ACCESS_KEY_ID"), source._errors(URI):
        raise OSError("Error performing PUT http://169.254.169.254/latest/api/token in 3.1s, after 4 retries")
    with pytest.raises(FetchError, match="AWS_REGION"), source._errors(URI):
        raise OSError("Client error with status 301 Moved Permanently: <Code>PermanentRedirect</Code>")


def test_a_copy_ends_when_an_object_is_changed_under_it(tmp_path: Path, server: ObjectServer) -> None:
    source = source_of(URI)
    source.files()
    server.changes = True
    with pytest.raises(FetchError, match=r"config\.json: it was changed"):
        list(source.chunks("config.json"))
    with pytest.raises(FetchError, match="is not there"):
        list(source.chunks("absent.json"))
