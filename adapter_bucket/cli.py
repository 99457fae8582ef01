"""The ``bucket-lora`` command: look at a bucket, check it, and tidy it up.

Tables for people, ``--json`` for machines. Exit code 0: all is well; 1: a problem was found, or the
command failed; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from adapter_bucket import cli_doctor, cli_runs, cli_top
from adapter_bucket.errors import BucketError
from adapter_bucket.lifecycle import DEFAULT_AGE_S
from adapter_bucket.stores import open_store


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    console = Console(stderr=arguments.json)
    command: Callable[..., tuple[Any, bool]] = arguments.command
    try:
        store = open_store(arguments.url)
        result, good = command(store, arguments, console)
    except BucketError as error:
        return _failed(arguments, console, error)
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        print(json.dumps(result, indent=1))
    return 0 if good else 1


def _failed(arguments: argparse.Namespace, console: Console, error: BucketError) -> int:
    if arguments.json:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}, indent=1))
    else:
        # markup=False: a message may hold brackets, and bucket content is not ours to interpret.
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
    return 1


def make_parser() -> argparse.ArgumentParser:
    """The command line; each command's function is in ``command``."""
    parser = argparse.ArgumentParser(prog="bucket-lora", description="Adapters in a bucket.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Any, text: str, *, run: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("url", metavar="URL", help="file:///dir, s3://bucket/prefix?…, hf://…")
        if run:
            sub.add_argument("run", metavar="RUN", help="id of the run")
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(command=command)
        return sub

    doctor = add(
        "doctor", cli_doctor.doctor, "test what the bucket can do, and how fast", run=False
    )
    doctor.add_argument("--samples", type=int, default=20, help="requests per latency figure")
    add("runs", cli_runs.runs, "list the runs", run=False)
    show = add("show", cli_runs.show, "show a run's versions and replicas")
    show.add_argument("--watch", action="store_true", help="keep showing until Ctrl-C")
    show.add_argument("--interval", type=float, default=1.0, help="seconds between polls")
    top = add("top", cli_top.top, "watch a run: versions, replicas, lag, load", run=False)
    top.add_argument("run", metavar="RUN", nargs="?", help="id of the run; else the newest one")
    top.add_argument("--proxy", metavar="URL", help="show its load too; token: BUCKET_LORA_TOKEN")
    top.add_argument("--once", action="store_true", help="print one frame")
    top.add_argument("--interval", type=float, default=2.0, help="seconds between frames")
    add("verify", cli_runs.verify, "read every version again and check it")
    export = add("export", cli_runs.export, "write one version as a PEFT directory")
    export.add_argument("version", metavar="VERSION", help="a number, or 'latest'")
    export.add_argument("directory", metavar="DIR", help="must not exist yet")
    gc = add("gc", cli_runs.collect_garbage, "remove what no manifest names")
    gc.add_argument("--older-than", type=float, default=DEFAULT_AGE_S, help="age in seconds")
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")
    add("finish", cli_runs.finish, "mark a run finished whose trainer is gone")
    delete = add("delete", cli_runs.delete, "delete a run's adapters")
    delete.add_argument("--yes", action="store_true", help="required: this cannot be undone")
    delete.add_argument("--purge", action="store_true", help="leave no tombstone: frees the run id")
    return parser


if __name__ == "__main__":
    sys.exit(main())
