import pytest

from mini_infer_engine.config.options.flags import options_from
from mini_infer_engine.config.options.server_options import ServerOptions, missing_port_fault
from mini_infer_engine.server.cli import make_parser, settings_from


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("", None),
        ("--role unified --transfer-port 0", None),
        ("--role decode --kv-transport nixl", None),
        ("--transfer-port 5559 --kv-transport nixl --kv-staging-memory 1GiB", None),
        ("--kv-transport auto --kv-staging-memory 128MiB", None),
        ("--kv-transport nixl", "--kv-transport moves nothing without a transfer port: add --transfer-port"),
        ("--kv-transport shm --transfer-port 0", "--kv-transport moves nothing"),
        ("--kv-staging-memory 1GiB", "--kv-staging-memory moves nothing"),
        ("--kv-transfer-bandwidth 1GiB", "--kv-transfer-bandwidth moves nothing"),
        ("--kv-transfer-lease 3", "--kv-transfer-lease moves nothing"),
        (
            "--no-kv-transfer-fallback --kv-transfer-timeout 3",
            "--kv-transfer-timeout, --kv-transfer-fallback move nothing without a transfer port: "
            "add --transfer-port PORT, or leave them out",
        ),
        ("--role prefill --transfer-port 0", "--role prefill needs a transfer port: leave out --transfer-port 0"),
        ("--role decode --transfer-port 0 --kv-transport nixl", "--role decode needs a transfer port"),
    ],
)
def test_kv_transfer_options_are_refused_when_there_is_no_transfer_port(flags: str, fault: str | None) -> None:
    value = make_parser().parse_args(["--model", "m", *flags.split()])
    found = missing_port_fault(options_from(value, ServerOptions), settings_from(value))
    assert found is None if fault is None else found is not None and found.startswith(fault)
