"""Writes an image whose files are the demo model, in OCI's layout, so that its digest is known before it is loaded."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import mini_infer_engine

DEMO = Path(mini_infer_engine.__file__).parent / "assets/demo"
FOLDER = "models/demo"
"""The folder in which the image has the model a second time, as hard links."""
NAMED = "io.containerd.image.name"
"""The annotation by which containerd names what it imports."""


def write_model_archive(repository: str, tag: str, archive: Path) -> str:
    """Writes an image of the demo model as `repository:tag`, and returns its digest, by which it is named as well."""
    layer = _layer()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        "config": {},
    }
    blobs = {_digest(layer): layer}

    def add(value: object, media_type: str) -> dict[str, object]:
        blob = json.dumps(value).encode()
        blobs[_digest(blob)] = blob
        return {"mediaType": f"application/vnd.oci.image.{media_type}", "digest": _digest(blob), "size": len(blob)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add(config, "config.v1+json"),
        "layers": [
            {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": _digest(layer), "size": len(layer)}
        ],
    }
    described = add(manifest, "manifest.v1+json")
    digest = str(described["digest"])
    names = (f"{repository}:{tag}", f"{repository}@{digest}")
    index = {
        "schemaVersion": 2,
        "manifests": [{**described, "annotations": {NAMED: name}} for name in names],
    }
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", json.dumps(index).encode())
        for name, blob in blobs.items():
            _add(tar, f"blobs/{name.replace(':', '/')}", blob)
    return digest


def _layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(DEMO.iterdir()):
            _add(tar, path.name, path.read_bytes())
        for path in sorted(DEMO.iterdir()):
            link = tarfile.TarInfo(f"{FOLDER}/{path.name}")
            link.type, link.linkname, link.mode = tarfile.LNKTYPE, path.name, 0o644
            tar.addfile(link)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    tar.addfile(member, io.BytesIO(content))


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"
