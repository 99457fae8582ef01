"""``python -m trl_async_bucket run [--bucket-url URL …] script.py …``: see ``auto``.

    python -m trl_async_bucket run --bucket-url s3://bucket/rl train.py --learning_rate 1e-5
    accelerate launch -m trl_async_bucket run --bucket-url s3://bucket/rl train.py

Options before the script are defaults of the config's ``bucket_*`` fields; what comes after it is
the script's own. With ``--bucket-url`` the script trains with ``weight_sync="bucket"``.
"""

from __future__ import annotations

import argparse
import dataclasses
import runpy
import sys
from pathlib import Path
from typing import Any

from adapter_bucket.errors import BucketError
from trl_async_bucket.config import BucketSyncFields


def parser() -> argparse.ArgumentParser:
    """The command line: one option per field, named as in the config."""
    top = argparse.ArgumentParser(prog="python -m trl_async_bucket")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a TRL script with bucket weight sync",
        usage="%(prog)s [--bucket-url URL …] script.py [arguments of the script …]",
        argument_default=argparse.SUPPRESS,
    )
    for field in dataclasses.fields(BucketSyncFields):
        flag = f"--{field.name.replace('_', '-')}"
        help_text = str(field.metadata["help"]).replace("%", "%%")
        if field.type == "bool":
            action = argparse.BooleanOptionalAction
            run.add_argument(flag, dest=field.name, action=action, help=help_text)
        else:
            kind: Any = {"int": int, "float": float}.get(str(field.type), str)
            run.add_argument(
                flag, dest=field.name, type=kind, help=help_text,
                choices=field.metadata.get("choices"), metavar="VALUE",
            )  # fmt: skip
    run.add_argument("script", type=Path)
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    return top


def main() -> None:
    """Run the script as ``__main__``, with the drop-ins in TRL's places."""
    options = vars(parser().parse_args())
    script, arguments = options.pop("script"), options.pop("arguments")
    options.pop("command")
    if "bucket_url" in options:
        options.setdefault("weight_sync", "bucket")
    if not script.is_file():
        sys.exit(f"{script} is no file: give the script to run after the --bucket-… options")
    try:
        from trl_async_bucket import auto

        auto.install(options)
    except BucketError as error:
        sys.exit(str(error))
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)  # as if the script had been run itself
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
