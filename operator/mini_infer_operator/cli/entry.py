"""Defines the commands of `mini-infer`: up, plan, chat, top, status, why, rollout, size, fetch, models, tune.

Imports nothing heavy before it knows which command runs.
"""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mini_infer_process.command_line import did_you_mean, duration, number_within
from mini_infer_process.endings import ends_quietly
from mini_infer_process.extras import missing_packages_name_the_extra
from mini_infer_process.logs import show_crashes

_COMMANDS = ("up", "plan", "chat", "top", "status", "why", "rollout", "size", "fetch", "models", "tune")
_ENGINE_COMMANDS = {
    "fetch": "mini_infer_engine.tools.fetch.command",
    "models": "mini_infer_engine.tools.models",
    "size": "mini_infer_engine.tools.sizing.command",
    "tune": "mini_infer_engine.tools.tuning.command",
}
"""Commands with a process of their own, whose modules only the engine has."""
_PROGRAMS = ("serve", "gateway", "operator", "compare")
"""Parts with a program of their own, which users look for among the commands."""
_RUN = """
import runpy
from mini_infer_process.endings import ends_quietly
from mini_infer_process.extras import missing_packages_name_the_extra
with ends_quietly("mini-infer {command}"), missing_packages_name_the_extra("mini-infer {command}", "engine"):
    runpy.run_module("{module}", run_name="__main__", alter_sys=True)
"""
_DESCRIPTION = """\
Serve language models: on this machine as processes, or look at what the operator would do in a cluster.

  mini-infer up -f examples/demo.yaml      run it here: engines, gateway, one OpenAI URL
  mini-infer chat                          talk to it
  mini-infer top                           watch its engines and requests in the terminal
  mini-infer plan -f examples/demo.yaml    print the Kubernetes objects that the operator would make
  mini-infer status                        what runs, here or in a cluster, and why something is not ready
  mini-infer why NAME                      all that is known of why it is as it is: conditions, engines, last log lines
  mini-infer size --model DIR --gpu H200   how many GPUs keep latency targets at a rate, as an InferenceService
  mini-infer fetch SOURCE DIR              copy a model into a folder or volume once, verified by hash
  mini-infer models                        which architectures run, from which code, with which features
  mini-infer tune --model DIR              measure kernels for a model on this GPU, for engines that start later
  mini-infer rollout undo NAME             back to the revision before; also status, history, restart, pause, resume
"""


_NAMESPACE_HELP = "in the cluster (default: that of the kubeconfig's current context, as for kubectl)"


def _release() -> str:
    """Returns our version, which images of a release are tagged with; "latest" in a checkout that is not installed."""
    try:
        return version("mini-infer")
    except PackageNotFoundError:
        return "latest"


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="mini-infer", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"mini-infer {_release()}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar=" | ".join(_COMMANDS),
    )

    up = commands.add_parser(
        "up",
        help="run an InferenceService on this machine, no cluster needed",
        description="Starts the engines of an InferenceService and a gateway, restarts what dies, applies edits of the "
        "file as they are saved, and ends everything on Ctrl-C. Logs go to .mini-infer/NAME/.",
    )
    up.add_argument("-f", "--file", type=Path, required=True, metavar="CR", help="YAML or JSON, one InferenceService")
    up.add_argument("--port", type=_port, default=8080, help="of the gateway (default: 8080)")
    up.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1; `::` for other machines)"
    )
    up.add_argument("-v", "--verbose", action="store_true", help="also print the logs of engines and gateway")

    plan = commands.add_parser(
        "plan",
        help="print the Kubernetes objects that the operator would make",
        description="Checks InferenceServices as the API server would, and prints what the operator would apply for "
        "them in an empty cluster. Manifests go to standard output, a summary to standard error.",
    )
    plan.add_argument("-f", "--file", type=Path, required=True, metavar="CR", help="YAML or JSON, InferenceServices")
    plan.add_argument(
        "--presets",
        type=Path,
        metavar="PATH",
        help="file or folder with InferencePresets, beside those in CR; the summary names the fields that one sets",
    )
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
    chat.add_argument(
        "--url",
        help="of the server (default: OPENAI_BASE_URL, else `mini-infer up` at port 8080 or a lone `mini-infer-serve` "
        "at 8000, whichever answers)",
    )
    chat.add_argument("--model", help="which one, where the server has several")
    chat.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    chat.add_argument("--temperature", type=_temperature, metavar="N", help="0 to 2 (default: the server's own)")
    chat.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="think before the answer, where the model can (default: as the model does)",
    )
    top = commands.add_parser(
        "top",
        help="watch engines and requests in the terminal",
        description="The fleet and the latest requests of a gateway, live, as its console at / shows them. "
        "OPENAI_API_KEY is sent where set: an administrator's key shows everything. Ctrl-C ends it.",
    )
    top.add_argument("--url", help="of the gateway (default: OPENAI_BASE_URL, else `mini-infer up` at port 8080)")
    top.add_argument("--once", action="store_true", help="print the present state and end, for scripts and pipes")
    _add_status(commands)
    _add_rollout(commands)
    # The engine's own flags: this package knows nothing of models and kernels.
    commands.add_parser("size", help="print a service that keeps latency targets at a rate", add_help=False)
    commands.add_parser("fetch", help="copy a model into a folder once", add_help=False)
    commands.add_parser("models", help="list the architectures that run", add_help=False)
    commands.add_parser("tune", help="measure kernels for a model on this GPU", add_help=False)
    return parser


def _add_status(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    status = commands.add_parser(
        "status",
        help="what runs, and one sentence for what is not ready",
        description="A line for each InferenceService: of `mini-infer up` in this folder, and of the cluster that "
        "KUBECONFIG names. Exits with 0 if all are ready, 1 if one is not, 2 if nothing could be read.",
    )
    status.add_argument(
        "name", nargs="?", type=_name, metavar="NAME", help="one service; all of the namespace if left out"
    )
    _add_where(status)
    status.add_argument("-A", "--all-namespaces", action="store_true", help="of every namespace")
    why = commands.add_parser(
        "why",
        help="all that is known of why a service is as it is",
        description="Conditions, engines with the last lines of their logs, and Events, for a service of "
        "`mini-infer up` in this folder or of a cluster. Exits with 0 if it is ready, 1 if not.",
    )
    why.add_argument("name", type=_name, metavar="NAME")
    _add_where(why)


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", type=_namespace, help=_NAMESPACE_HELP)
    parser.add_argument("--local", action="store_true", help="look at `mini-infer up` in this folder only")


def _add_rollout(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    rollout = commands.add_parser(
        "rollout",
        help="status, history, undo, restart, pause, resume, promote, abort of a service in a cluster",
        description="What `kubectl rollout` does for a Deployment, for an InferenceService.",
    )
    verbs = rollout.add_subparsers(
        dest="verb", required=True, metavar="status | history | undo | restart | pause | resume | promote | abort"
    )
    for verb, text in (
        ("status", "follow a rollout until the spec runs (exit code 0), or cannot go on (1)"),
        ("history", "the kept revisions, and what each changed"),
        ("undo", "write the spec of an earlier revision; replicas and rollout limits stay"),
        ("restart", "replace every engine by a new one of the same spec, without a gap"),
        ("pause", "let edits of the spec wait, and a canary stay at its step; scaling goes on"),
        ("resume", "carry out edits again"),
        ("promote", "let the revision that is judged, or was rolled back, replace the old one now"),
        ("abort", "roll the revision that is judged back now"),
    ):
        parser = verbs.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".")
        parser.add_argument("name", type=_name, metavar="NAME")
        parser.add_argument("-n", "--namespace", type=_namespace, help=_NAMESPACE_HELP)
        if verb == "status":
            parser.add_argument(
                "--timeout",
                type=duration,
                default=600.0,
                metavar="S",
                help="give up after so long: seconds, or 90s, 10m, 1h30m; 0: never (default: 600)",
            )
        if verb == "undo":
            parser.add_argument("--to-revision", type=int, metavar="N", help="a number that history shows")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code."""
    show_crashes()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks
    parser = build_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help()
        return 0
    if (fault := _no_command(arguments[0])) is not None:
        print(f"mini-infer: {fault}", file=sys.stderr)
        return 2
    options, unknown = parser.parse_known_args(arguments)
    if options.command in _ENGINE_COMMANDS:
        code = _RUN.format(command=options.command, module=_ENGINE_COMMANDS[options.command])
        os.execv(sys.executable, [sys.executable, "-c", code, *unknown])  # signals and exit status are the tool's own
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    extra = "all" if options.command == "up" else "operator"
    command = f"mini-infer {options.command}"
    with ends_quietly(command), missing_packages_name_the_extra(command, extra):
        return _run(options)


def _no_command(word: str) -> str | None:
    """Returns why the first word of a command line is no command, and what to type instead; None if it is one."""
    if word.startswith("-") or word in _COMMANDS:
        return None
    if word in _PROGRAMS:
        return f"there is no command {word}: it is a program of its own, `mini-infer-{word}`"
    return f"there is no command {word!r}{did_you_mean(word, _COMMANDS, '`mini-infer --help` lists them')}"


def _run(options: argparse.Namespace) -> int:
    if options.command == "up":
        from mini_infer_operator.local.up import up

        return up(options.file, options.host, options.port, verbose=options.verbose)
    if options.command == "plan":
        from mini_infer_operator.cli.plan_command import show_plan
        from mini_infer_operator.images import EngineImages

        images = EngineImages(options.engine_image, options.engine_cuda_image or None)
        return show_plan(options.file, options.output, images, options.presets)
    if options.command == "status":
        from mini_infer_operator.cli.status_command import show_status

        return show_status(options.name, _namespace_of(options), everywhere=options.all_namespaces, local=options.local)
    if options.command == "why":
        from mini_infer_operator.cli.status_command import show_why

        return show_why(options.name, _namespace_of(options), local=options.local)
    if options.command == "rollout":
        return _rollout(options)
    if options.command == "top":
        from mini_infer_operator.cli.top import top

        return top(options.url, once=options.once)
    from mini_infer_operator.cli.chat import chat

    return chat(
        options.url, options.model, system=options.system, temperature=options.temperature, thinking=options.thinking
    )


def _namespace_of(options: argparse.Namespace) -> str:
    from mini_infer_web.kubernetes_api import current_namespace

    return options.namespace or current_namespace()


def _rollout(options: argparse.Namespace) -> int:
    from mini_infer_operator.cli import rollout_command as rollout

    name, namespace = options.name, _namespace_of(options)
    if options.verb == "status":
        return rollout.status(name, namespace, options.timeout)
    if options.verb == "history":
        return rollout.history(name, namespace)
    if options.verb == "undo":
        return rollout.undo(name, namespace, options.to_revision)
    if options.verb == "restart":
        return rollout.restart(name, namespace)
    if options.verb in ("promote", "abort"):
        return rollout.decide(name, namespace, promote=options.verb == "promote")
    return rollout.pause(name, namespace, paused=options.verb == "pause")


def _name(text: str) -> str:
    """Parses the name of an object. It becomes a part of a request's path, so nothing but a name may pass."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name: write 1 to 63 of a-z, 0-9 and -, with a letter or digit at both ends"
        )
    return text


def _namespace(text: str) -> str | None:
    """Parses a namespace. An empty one, as of an unset variable of a script, is none, as for kubectl."""
    return _name(text) if text else None


def _temperature(text: str) -> float:
    if (number := number_within(text, 0, 2)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no temperature: write a number from 0 to 2")
    return number


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: write a number from 1 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
