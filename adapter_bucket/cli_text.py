"""How the ``bucket-lora`` command prints what was read from a bucket.

As text: never as markup, and never as terminal codes.
"""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

MAX_CHARACTERS = 500
"""Of one cell; more would be somebody's attempt to push the rest off the screen."""


def table(*columns: str) -> Table:
    """A table without lines."""
    made = Table(box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def plain(value: object, *, style: str = "") -> Text:
    """The value as text, with everything that is not printable replaced."""
    shown = str(value)[:MAX_CHARACTERS]
    return Text("".join(char if char.isprintable() else "�" for char in shown), style=style)
