import msgspec
import pytest

from mini_infer_contract import launch
from mini_infer_contract.launch import Endpoint, EndpointsFile

FILE = EndpointsFile(endpoints=[Endpoint(name="a", url="http://127.0.0.1:8001", model="demo", events="tcp://a:5557")])


@pytest.mark.parametrize("encoding", [msgspec.json, msgspec.yaml])
def test_the_endpoints_file_survives_writing_and_reading(encoding: object) -> None:
    text = encoding.encode(FILE)  # type: ignore[attr-defined]
    assert encoding.decode(text, type=EndpointsFile) == FILE  # type: ignore[attr-defined]


def test_an_endpoint_is_refused_when_name_url_or_model_is_missing() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"`url` - at `\$.endpoints\[0\]`"):
        msgspec.yaml.decode("endpoints: [{name: a, model: demo}]", type=EndpointsFile)


def test_paths_and_ports_are_unique() -> None:
    paths = [value for name, value in vars(launch).items() if name.endswith("_PATH")]
    ports = [value for name, value in vars(launch).items() if name.endswith("_PORT")]
    assert len(paths) == len(set(paths)) >= 6
    assert len(ports) == len(set(ports)) == 6
    assert all(path.startswith("/") for path in paths)
