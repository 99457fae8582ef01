"""Log lines as JSON, for all three parts by one switch: ``BUCKET_LORA_LOG=json``.

Owns the format and the hiding of secrets. What a line is about stands in fields of its own (run,
version, replica), so that one run can be followed through the logs of every machine.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from typing import Any

from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import adapter_name
from adapter_bucket.trace_ids import trace_id

LOG_ENV = "BUCKET_LORA_LOG"
PACKAGES = ("adapter_bucket", "trl_async_bucket", "vllm_bucket_lora", "bucket_lora_proxy")

SECRETS = (
    "BUCKET_LORA_TOKEN",
    "BUCKET_LORA_PROXY_TOKEN",
    "BUCKET_LORA_REPLICA_TOKEN",
    "BUCKET_LORA_SIGNING_KEYS",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "VLLM_API_KEY",
)
"""Variables whose values never appear in a line, should an error of another library quote them."""

MIN_SECRET_LENGTH = 6
"""A shorter value would be found inside ordinary words."""

_HIDDEN = "***"
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_ABOUT = ("run", "version", "replica")


def about(
    run: str | None = None, version: int | None = None, replica: str | None = None
) -> dict[str, Any]:
    """What a line is about, as the ``extra=`` of a logging call."""
    given = {"run": run, "version": version, "replica": replica}
    return {name: value for name, value in given.items() if value is not None}


def wants_json() -> bool:
    """Whether the environment asks for JSON.

    Raises:
        ConfigError: it asks for something that there is not.
    """
    asked = os.environ.get(LOG_ENV, "text")
    if asked not in ("json", "text"):
        raise ConfigError(f"{LOG_ENV} is {asked[:50]!r}; use json, or text (the default)")
    return asked == "json"


def set_up_logs(part: str, *, whole_process: bool = False, **fields: str) -> bool:
    """Write our log lines as JSON to stderr, if the environment asks for it. Idempotent.

    Args:
        part: ``trainer``, ``replica`` or ``proxy``.
        whole_process: Also take the lines of all other libraries.
        fields: Values of every line of this process, such as its run.

    Returns:
        Whether it was done; if not, nothing was changed.

    Raises:
        ConfigError: see ``wants_json``.
    """
    if not wants_json():
        return False
    if part == "trainer" and "RANK" in os.environ:  # torchrun's and accelerate's
        fields["rank"] = os.environ["RANK"]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(part=part, **fields))
    for name in ("",) if whole_process else PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Keyword arguments are fields of every line."""

    def __init__(self, **fields: str) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The line; a line break inside a message is escaped, so that no message makes two."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._fields,
        }
        for name in _ABOUT:
            if hasattr(record, name):
                line[name] = getattr(record, name)
        if "run" in line and "version" in line:
            line["trace_id"] = trace_id(adapter_name(line["run"], line["version"]))
        line |= {"logger": record.name, "message": hide_secrets(record.getMessage())}
        if record.exc_info:
            line["error"] = hide_secrets(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


def hide_secrets(text: str) -> str:
    """The text without logins in URLs and without the values of ``SECRETS``."""
    text = hide_logins(text)
    for value in _secrets():
        text = text.replace(value, _HIDDEN)
    return text


def hide_logins(text: str) -> str:
    """The text without user and password in its URLs."""
    return _LOGIN.sub(_HIDDEN, text)


def _secrets() -> list[str]:
    values = [one for name in SECRETS for one in re.split(r"[\s,]+", os.environ.get(name, ""))]
    # Of a signing key, <id>:<hex>, only the second half is secret; messages name the first.
    values += [value.rpartition(":")[2] for value in values]
    return [value for value in values if len(value) >= MIN_SECRET_LENGTH]
