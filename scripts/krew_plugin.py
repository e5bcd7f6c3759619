"""Makes the archive of `kubectl infer` and its krew manifest.

usage: krew_plugin.py WHEEL FOLDER --uri URL

FOLDER gets kubectl-infer.tar.gz, the same bytes for the same wheel, and infer.yaml, whose `uri` is URL: where the
archive will be. The plugin is a launcher: it runs `mini-infer` where that is on the PATH, and else installs the wheel,
which the archive has, into a folder of the user's cache, once for each version.
"""

import argparse
import gzip
import hashlib
import io
import re
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHIVE, MANIFEST, PROGRAM = "kubectl-infer.tar.gz", "infer.yaml", "kubectl-infer"
SYSTEMS = [("linux", "amd64"), ("linux", "arm64"), ("darwin", "amd64"), ("darwin", "arm64")]
_WHEEL = re.compile(r"mini_infer-(?P<version>[0-9]+\.[0-9]+\.[0-9]+)[^-]*-py3-none-any\.whl")
_MANIFEST = """\
# Made by scripts/krew_plugin.py. To try it: kubectl krew install --manifest={manifest} --archive={archive}
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: infer
spec:
  version: v{version}
  shortDescription: Serve language models with mini-infer
  description: |
    Status, reasons, rollouts, plans and sizes of InferenceServices, and chats with them:
    kubectl infer status -A, kubectl infer why NAME, kubectl infer rollout undo NAME.
  caveats: |
    Needs Python 3.11 to 3.13. If mini-infer is not on the PATH, the first run installs it
    into ~/.cache/mini-infer, from the package index that pip is configured for.
  platforms:
{platforms}"""
_PLATFORM = """\
    - selector:
        matchLabels: {{os: {os}, arch: {arch}}}
      uri: {uri}
      sha256: {sha256}
      bin: {program}
"""


def build(wheel: Path, folder: Path, uri: str) -> Path:
    """Writes archive and manifest. Returns the manifest's path. Exits if the file is no wheel of ours."""
    found = _WHEEL.fullmatch(wheel.name)
    if found is None:
        raise SystemExit(
            f"{wheel.name} is no wheel of mini-infer with a version of three numbers: pip wheel --no-deps ."
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        PROGRAM: (ROOT / "scripts" / "kubectl-infer").read_bytes(),
        wheel.name: wheel.read_bytes(),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    (folder / ARCHIVE).write_bytes(archive_of(files))
    digest = hashlib.sha256((folder / ARCHIVE).read_bytes()).hexdigest()
    platforms = "".join(
        _PLATFORM.format(os=system, arch=machine, uri=uri, sha256=digest, program=PROGRAM)
        for system, machine in SYSTEMS
    )
    text = _MANIFEST.format(version=found["version"], platforms=platforms, manifest=MANIFEST, archive=ARCHIVE)
    (folder / MANIFEST).write_text(text)
    return folder / MANIFEST


def archive_of(files: dict[str, bytes]) -> bytes:
    """Returns a tar.gz that depends on names and contents alone."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if name == PROGRAM else 0o644
            tar.addfile(info, io.BytesIO(content))
    return gzip.compress(plain.getvalue(), mtime=0)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--uri", required=True, metavar="URL", help="https:// address that the archive will have")
    options = parser.parse_args()
    print(build(options.wheel, options.folder, options.uri))


if __name__ == "__main__":
    main()
