"""The TOML file of settings: names of the flags, with underscores. Checked, then used as defaults.

Tokens do not stand in it; it names the files that hold them.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

from adapter_bucket.errors import ConfigError

_NOT_IN_FILE = frozenset({"config", "check", "help"})


def read_config_file(path: Path, parser: argparse.ArgumentParser) -> dict[str, object]:
    """Read settings for ``parser.set_defaults``.

    Raises:
        ConfigError: unreadable, not TOML, a name that is no setting, or a value of a wrong type.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    actions = {a.dest: a for a in parser._actions if a.dest not in _NOT_IN_FILE}
    settings: dict[str, object] = {}
    for name, value in document.items():
        action = actions.get(name)
        if action is None:
            known = ", ".join(sorted(actions))
            raise ConfigError(f"{name!r} in config file {path} is no setting; known are: {known}")
        settings[name] = _checked(action, value, f"{name} in config file {path}")
    return settings


def _checked(action: argparse.Action, value: object, where: str) -> object:
    if action.dest == "replica":
        if isinstance(value, list) and all(isinstance(url, str) for url in value):
            return value
        expected = 'a list of URLs, ["http://…"]'
    elif action.nargs == 0:
        if isinstance(value, bool):
            return value
        expected = "true or false"
    elif action.type in (int, float):
        if isinstance(value, int) and not isinstance(value, bool):
            return action.type(value)
        if isinstance(value, float) and action.type is float:
            return value
        expected = "a whole number" if action.type is int else "a number"
    else:
        if isinstance(value, str):
            return Path(value) if action.type is Path else value
        expected = "text in quotes"
    raise ConfigError(f"{where} is {value!r}; it must be {expected}")
