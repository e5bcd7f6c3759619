"""`mini-infer`: up, plan, chat. Imports nothing heavy before it knows which."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_DESCRIPTION = """\
Serve language models: on this machine as processes, or look at what the operator would do in a cluster.

  mini-infer up -f examples/demo.yaml      run it here: engines, gateway, one OpenAI URL
  mini-infer chat                          talk to it
  mini-infer plan -f examples/demo.yaml    print the Kubernetes objects that the operator would make
"""


def _release() -> str:
    """Our version, which images of a release are tagged with; "latest" in a checkout that is not installed."""
    try:
        return version("mini-infer")
    except PackageNotFoundError:
        return "latest"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="mini-infer", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="up | plan | chat")

    up = commands.add_parser(
        "up",
        help="run an InferenceService on this machine, no cluster needed",
        description="Starts the engines of an InferenceService and a gateway, restarts what dies, applies edits of the "
        "file as they are saved, and ends everything on Ctrl-C. Logs go to .mini-infer/NAME/.",
    )
    up.add_argument("-f", "--file", type=Path, required=True, metavar="CR", help="YAML or JSON, one InferenceService")
    up.add_argument("--port", type=_port, default=8080, help="of the gateway (default: 8080)")
    up.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1; 0.0.0.0 for other machines)"
    )
    up.add_argument("-v", "--verbose", action="store_true", help="also print the logs of engines and gateway")

    plan = commands.add_parser(
        "plan",
        help="print the Kubernetes objects that the operator would make",
        description="Checks InferenceServices as the API server would, and prints what the operator would apply for "
        "them in an empty cluster. Manifests go to standard output, a summary to standard error.",
    )
    plan.add_argument("-f", "--file", type=Path, required=True, metavar="CR", help="YAML or JSON, InferenceServices")
    plan.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="(default: yaml)")
    plan.add_argument(
        "--engine-image",
        default=f"mini-infer-engine-cpu:{_release()}",
        metavar="IMAGE",
        help="what the operator was given for services that name no image (default: %(default)s, as in the chart)",
    )
    plan.add_argument(
        "--engine-cuda-image",
        default=f"mini-infer-engine-cuda:{_release()}",
        metavar="IMAGE",
        help="the same for services that ask for a GPU (default: %(default)s, as in the chart)",
    )

    chat = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="A conversation with any OpenAI-compatible server. Lines can be piped in, each a message. "
        "OPENAI_API_KEY is sent where set.",
    )
    chat.add_argument("--url", default="http://127.0.0.1:8080", help="of the gateway (default: http://127.0.0.1:8080)")
    chat.add_argument("--model", help="which one, where the server has several")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    given = build_parser().parse_args(arguments)
    if given.command == "up":
        from mini_infer_operator.local.up import up

        return up(given.file, given.host, given.port, verbose=given.verbose)
    if given.command == "plan":
        from mini_infer_operator.cli.plan_command import show_plan
        from mini_infer_operator.images import EngineImages

        images = EngineImages(given.engine_image, given.engine_cuda_image or None)
        return show_plan(given.file, given.output, images)
    from mini_infer_operator.cli.chat import chat

    return chat(given.url, given.model)


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: write a number from 1 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
