"""Creates the peer secret of one `mini-infer up`: new at every start, in a file that only this user can read."""

import os
from pathlib import Path

from mini_infer_contract.peer_auth import PeerSecret


def write_peer_key(folder: Path) -> Path:
    """Writes a new secret in place of an older one. Returns its path."""
    path = folder / "peer.key"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(PeerSecret.generate().hex() + "\n")
    return path
