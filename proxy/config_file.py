"""The TOML file of settings: names of the flags, with underscores. Checked, then used as defaults.

Tokens do not stand in it; it names the files that hold them.
"""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import dataclass
from pathlib import Path

from adapter_bucket.errors import ConfigError

_NOT_IN_FILE = frozenset({"config", "check", "help"})

_TEXT_KEY = {"replica": "url", "allow_replica": "pattern"}
"""Lists whose items may be tables, with the name of the key that holds the item's text."""


@dataclass(frozen=True)
class Entry:
    """One item of a list: a URL, a pattern or a run, and where its own token is."""

    text: str
    token_file: Path | None = None
    token_env: str | None = None


def read_config_file(
    path: Path, parser: argparse.ArgumentParser
) -> tuple[dict[str, object], dict[str, list[Entry]]]:
    """Read settings for ``parser.set_defaults``, and the lists.

    Raises:
        ConfigError: unreadable, not TOML, a name that is no setting, or a value of a wrong type.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    actions = {a.dest: a for a in parser._actions if a.dest not in _NOT_IN_FILE}
    settings: dict[str, object] = {}
    lists: dict[str, list[Entry]] = {}
    for name, value in document.items():
        action = actions.get(name)
        if action is None:
            known = ", ".join(sorted(actions))
            raise ConfigError(f"{name!r} in config file {path} is no setting; known are: {known}")
        where = f"{name} in config file {path}"
        if isinstance(action.default, list):
            lists[name] = _entries(name, value, where)
        else:
            settings[name] = _checked(action, value, where)
    return settings, lists


def _entries(name: str, value: object, where: str) -> list[Entry]:
    key = _TEXT_KEY.get(name)
    if isinstance(value, list):
        entries = [_entry(key, item) for item in value]
        if all(entry is not None for entry in entries):
            return [entry for entry in entries if entry is not None]
    expected = "a list of texts"
    if key is not None:
        expected += f' or of tables {{{key} = "…", token_env = "…"}} (or token_file)'
    raise ConfigError(f"{where} is {_outline(value)}; it must be {expected}")


def _outline(value: object) -> str:
    """A value that is no list as it should be, without its texts: one may be a token."""
    if isinstance(value, list):
        return f"[{', '.join(map(_outline, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = …' for name in value)}}}"
    return "a text" if isinstance(value, str) else repr(value)


def _entry(key: str | None, item: object) -> Entry | None:
    if isinstance(item, str):
        return Entry(item)
    if key is None or not isinstance(item, dict) or not isinstance(item.get(key), str):
        return None
    rest = {name: text for name, text in item.items() if name != key}
    if len(rest) > 1 or not rest.keys() <= {"token_file", "token_env"}:
        return None
    if not all(isinstance(text, str) for text in rest.values()):
        return None
    path = rest.get("token_file")
    return Entry(item[key], Path(path) if path is not None else None, rest.get("token_env"))


def _checked(action: argparse.Action, value: object, where: str) -> object:
    if action.nargs == 0:
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
