"""TLS of a server from files, which may change while it runs: a renewed certificate is served without a restart."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

LOOK_EVERY_S = 10.0
"""Seconds between two looks at the files; certificates are renewed days before they end."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files and options of a server's TLS. The names are those of vLLM's flags."""

    ssl_certfile: str | None = None
    """File with the server's certificate, followed by the intermediate ones up to the CA; None if there is no TLS."""
    ssl_keyfile: str | None = None
    """File with the private key; None if the key is in the certificate's file."""
    ssl_ca_certs: str | None = None
    """File with the CA certificates by which clients' certificates are checked."""
    ssl_cert_reqs: int = ssl.CERT_NONE
    """Requirement for a client certificate: 0 no, 1 may, 2 must."""

    def load_into(self, context: ssl.SSLContext) -> None:
        """Makes new connections use the files as they are now. Raises ValueError if one is missing or broken."""
        assert self.ssl_certfile is not None
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except OSError as error:
            files = f"{self.ssl_certfile} and {self.ssl_keyfile}" if self.ssl_keyfile else self.ssl_certfile
            raise ValueError(f"no certificate with its key can be read from {files}: {error}") from None
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                raise ValueError(f"no CA's certificates can be read from {self.ssl_ca_certs}: {error}") from None

    def signature(self) -> tuple[tuple[int, int, int], ...]:
        """Returns a value that changes when one of the files does."""
        names = (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        return tuple(_file_signature(Path(name)) for name in names if name)


class ServerTls:
    """The TLS of a listening socket."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises a ValueError that says which file is wrong and how."""
        if files.ssl_cert_reqs and files.ssl_ca_certs is None:
            raise ValueError("--ssl-cert-reqs checks clients' certificates against a CA: name it with --ssl-ca-certs")
        self._files, self._signature = files, files.signature()
        self.context = self._load()

    def look(self) -> None:
        """Loads files that have changed; while they are broken, the previous ones are served."""
        found = self._files.signature()
        if found == self._signature:
            return
        self._signature = found
        try:
            self._load()  # Apart first: one of two files may not have changed yet.
            self._files.load_into(self.context)
            log.info("%s has changed: new connections get the new certificate", self._files.ssl_certfile)
        except ValueError as error:
            log.warning("the certificate of before stays in force: %s", error)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._files.load_into(context)
        context.verify_mode = ssl.VerifyMode(self._files.ssl_cert_reqs)
        return context


def server_tls(files: TlsFiles) -> ServerTls | None:
    """Returns the server's TLS; None if none is configured. Raises a ValueError that says which file is
    wrong and how.
    """
    if files.ssl_certfile is not None:
        return ServerTls(files)
    if files.ssl_keyfile or files.ssl_ca_certs or files.ssl_cert_reqs:
        raise ValueError("TLS needs a certificate: name its file with --ssl-certfile")
    return None


def _file_signature(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_ino, found.st_size


def client_context(
    ca_certs: str | None = None, certfile: str | None = None, keyfile: str | None = None
) -> ssl.SSLContext:
    """Returns a context for connections to servers, whose certificates are checked against this CA alone, or the
    system's.

    Raises a ValueError that says which file is wrong and how.
    """
    try:
        context = ssl.create_default_context(cafile=ca_certs)
    except OSError as error:
        raise ValueError(f"no CA's certificates can be read from {ca_certs}: {error}") from None
    if certfile is not None:
        TlsFiles(ssl_certfile=certfile, ssl_keyfile=keyfile).load_into(context)
    return context
