"""Files of TLS: what is wrong with them is said, and what changes is served without a restart."""

import logging
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest

from mini_infer_web.tls import ServerTls, TlsFiles, client_context, server_tls
from tests.support.tls_files import make_ca, make_certificate, needs_openssl

pytestmark = needs_openssl


def files(folder: Path, name: str, **more: object) -> TlsFiles:
    return TlsFiles(ssl_certfile=str(folder / f"{name}.pem"), ssl_keyfile=str(folder / f"{name}.key"), **more)  # type: ignore[arg-type]  # of a test's keywords


def served_name(tls: ServerTls, client: ssl.SSLContext) -> str:
    """The common name in the certificate that a new connection is shown."""
    here, there = socket.socketpair()

    def serve() -> None:
        with there, tls.context.wrap_socket(there, server_side=True) as connection:
            connection.recv(1)

    server = threading.Thread(target=serve)
    server.start()
    with here, client.wrap_socket(here, server_hostname="127.0.0.1") as connection:
        certificate = connection.getpeercert()
        connection.send(b"x")
    server.join()
    assert certificate is not None
    return str(dict(pair for (pair,) in certificate["subject"])["commonName"])  # type: ignore[misc, union-attr]  # typeshed's union of all fields


def test_a_renewed_certificate_is_served_unless_it_is_broken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = client_context(str(make_ca(tmp_path)))
    make_certificate(tmp_path, "server")
    make_certificate(tmp_path, "renewed")
    tls = ServerTls(files(tmp_path, "server"))
    assert served_name(tls, client) == "server"
    (tmp_path / "server.pem").write_bytes((tmp_path / "renewed.pem").read_bytes())
    tls.look()  # The key is still that of the other certificate.
    assert "stays in force" in caplog.text
    assert served_name(tls, client) == "server"
    shutil.copy(tmp_path / "renewed.key", tmp_path / "server.key")
    tls.look()
    assert served_name(tls, client) == "renewed"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"ssl_certfile": None}, "--ssl-certfile"),
        ({"ssl_certfile": None, "ssl_keyfile": None, "ssl_cert_reqs": 2}, "--ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "name it with --ssl-ca-certs"),
        ({"ssl_keyfile": "other.key"}, "no certificate"),
        ({"ssl_ca_certs": "missing.pem"}, "no CA's certificates"),
    ],
)
def test_the_error_names_a_tls_flag_when_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, object], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_ca(tmp_path)
    make_certificate(tmp_path, "server")
    make_certificate(tmp_path, "other")
    value: dict[str, object] = {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key"} | more
    with pytest.raises(ValueError, match=problem):
        server_tls(TlsFiles(**value))  # type: ignore[arg-type]  # of a test's keywords


def test_tls_is_off_when_no_files_are_given() -> None:
    assert server_tls(TlsFiles()) is None
