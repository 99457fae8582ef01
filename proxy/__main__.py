"""``bucket-lora-proxy``: the command."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence

from adapter_bucket.errors import ConfigError
from adapter_bucket.json_logs import set_up_logs
from bucket_lora_proxy.check import bucket_report, report
from bucket_lora_proxy.config_flags import build_parser
from bucket_lora_proxy.config_sources import parse_config
from bucket_lora_proxy.server import Server

GC_THRESHOLD = 20_000
"""New objects after which cycles are looked for; the default of 700 is a few requests."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Returns 2 for a wrong setting, 1 if the server can't start, or with ``--check`` if the bucket
    can't be read.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        config = parse_config(argv, os.environ)
        text = report(config)  # also reads the certificates
        if build_parser().parse_args(argv).check:
            bucket, readable = bucket_report(config)
            print("\n".join(filter(None, (text, bucket))))
            return 0 if readable else 1
        if not set_up_logs("proxy", whole_process=True):
            logging.basicConfig(
                level=logging.INFO,
                stream=sys.stderr,
                format="%(asctime)s %(levelname)s %(name)s %(message)s",
            )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        server = Server(config)
    except ConfigError as error:
        print(f"bucket-lora-proxy: {error}", file=sys.stderr)
        return 2
    # What is alive now stays so, and requests leave no cycles: collecting took 6 % of all time.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
