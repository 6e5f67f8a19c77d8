"""Serve models over HTTP, as OpenAI's API for transcriptions, with a page that records and compares.

    python -m finetune.serve --model runs/mine
    python -m finetune.serve --model tuned=runs/mine --model base=nvidia/parakeet-tdt-0.6b-v3

Open http://127.0.0.1:8000 to speak into the microphone and see what each model writes; give any client of OpenAI's API
http://127.0.0.1:8000/v1 as its base URL. Requests are decoded together; a recording may be hours long.

Only this machine can reach the server, unless --host says otherwise. Where PARAKEET_API_KEY is set in the environment,
clients have to send it.
"""

import argparse
import ipaddress
import logging
import os
import sys
from pathlib import Path

from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import MODEL, add_decoding, add_head, command, device_of, positive, run_command

log = logging.getLogger("finetune.serve")  # under python -m, __name__ is __main__

KEY = "PARAKEET_API_KEY"
EXTRA = "pip install -c constraints.txt -e '.[serve]'"
SHUTDOWN_SECONDS = 30
EXAMPLE = "python -m finetune.serve --model tuned=runs/quickstart --model base=examples/base"


def make_parser() -> argparse.ArgumentParser:
    parser = command("serve", __doc__ or "", EXAMPLE)
    add = parser.add_argument
    names = "with NAME clients ask for it (default: the last part of M); several models share the device"
    add(
        "--model",
        action="append",
        required=True,
        metavar="[NAME=]M",
        help=f"{MODEL}, or an exported directory; {names}",
    )
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen at (default: 127.0.0.1, this machine alone)")
    add("--port", type=int, default=8000, metavar="N", help="to listen at; 0: any that is free (default: 8000)")
    add(
        "--max-requests",
        type=positive,
        default=32,
        metavar="N",
        help="at a time; more are answered with 503 (default: 32)",
    )
    add("--max-megabytes", type=float, default=25, metavar="MB", help="of an uploaded file (default: 25)")
    add("--max-minutes", type=float, default=240, metavar="M", help="of a recording (default: 240)")
    add_decoding(parser, 8, "chunks of one request or several")
    add_head(parser)
    return parser


def name_and_model(text: str) -> tuple[str, str]:
    """Return the name under which a model is served, and where it is."""
    name, equals, model = text.partition("=")
    if equals and name and "/" not in name:
        return name, model
    return text.rstrip("/").rsplit("/", 1)[-1].removesuffix(".nemo"), text


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    named = [name_and_model(text) for text in arguments.model]
    names = [name for name, _ in named]
    if twice := [name for name in names if names.count(name) > 1]:
        parser.error(f"--model: two models are called {twice[0]!r}; name them: --model tuned=A --model base=B")
    arguments.models = dict(named)
    if not 0 <= arguments.port < 65536:
        parser.error("--port has to be 0 to 65535")
    for option in ("max_megabytes", "max_minutes"):
        if not 0 < getattr(arguments, option) < float("inf"):
            parser.error(f"--{option.replace('_', '-')} has to be above 0")
    return arguments


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit code."""
    arguments = parse_arguments(argv)
    set_up_logging(arguments.verbose)
    try:
        return serve(arguments)
    except UserError as error:
        print_error(error)
        return error.exit_code


def serve(arguments: argparse.Namespace) -> int:
    """Load the models, listen, and serve.

    Raises:
        UserError: a package or a model is missing, or nothing can listen at the address.
    """
    import socket

    import torch

    try:
        import uvicorn

        from finetune.tools.serving.api import ServingLimits, make_app
        from finetune.tools.serving.batcher import Batcher
        from finetune.tools.serving.models import Served, ServedExport, ServedModel
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette", "python_multipart"):
            raise
        raise UserError(f"serve needs the package {error.name}, which is not installed: {EXTRA}") from error
    from finetune.models.loading import load_option, move_to_device
    from finetune.models.nemo import set_head, warn_about_search
    from finetune.tools.export.using import is_export, open_unchanged

    listener = socket.socket(socket.AF_INET6 if ":" in arguments.host else socket.AF_INET)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # Before the models are loaded, which may take a minute.
            listener.bind((arguments.host, arguments.port))
        except OSError as error:
            raise UserError(
                f"nothing can listen at {arguments.host}:{arguments.port}: {error.strerror}. Choose another --port.",
                exit_code=1,
            ) from error
        key = os.environ.get(KEY)
        if not key and not is_loopback(arguments.host):
            log.warning("whoever reaches %s can use this server: set %s to ask for a key", arguments.host, KEY)
        models: dict[str, Served] = {}
        for name, place in arguments.models.items():
            if is_export(place):
                if arguments.head is not None or arguments.device not in (None, "cpu"):
                    raise UserError(
                        f"--head, --device: {place} is an export: its head is chosen, and it runs on the CPU."
                    )
                models[name] = ServedExport(open_unchanged(Path(place), torch.get_num_threads()))
                continue
            model = move_to_device(load_option(place, None), device_of(arguments))
            set_head(model, arguments.head, place)
            warn_about_search(model)
            models[name] = ServedModel(model)
        limits = ServingLimits(arguments.max_requests, arguments.max_megabytes, arguments.max_minutes)
        with Batcher(models, arguments.batch_size) as batcher:
            config = uvicorn.Config(
                make_app(batcher, limits, key),
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            log.info("serving %s at http://%s:%d, API at /v1; Ctrl-C ends it", ", ".join(models), shown, port)
            uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
