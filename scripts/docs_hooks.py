"""Hooks of the documentation's build (mkdocs.yml).

The same Markdown files are read in a clone and on the site. On the site, a link to a file of the
repository outside `docs/` becomes the file's name, checked to exist, or a link if `repo_url` is
set; and the list of decisions is made from their files, so that it can't be forgotten.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

# A warning of a logger below "mkdocs" ends a strict build.
logger = logging.getLogger("mkdocs.hooks.docs")

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
_DECISIONS = "<!-- decisions -->"
_TITLE = re.compile(r"^# 0*(?P<number>\d+)[.:] (?P<title>.+)$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace links that leave `docs/`, and the mark of the list of decisions."""
    docs = Path(config["docs_dir"])
    if _DECISIONS in markdown:
        markdown = markdown.replace(_DECISIONS, decision_list(docs / "decisions"))
    here = (docs / page.file.src_uri).parent
    return _LINK.sub(lambda link: _outside(link, here, docs, config["repo_url"]), markdown)


def decision_list(folder: Path) -> str:
    """One line per decision, by number."""
    lines = []
    for path in sorted(folder.glob("[0-9]*.md")):
        found = _TITLE.search(path.read_text(encoding="utf-8"))
        if found is None:
            logger.warning("%s does not begin with '# <number>. <title>'", path.name)
            continue
        lines.append(f"* [{found['number']}]({path.name}): {found['title']}")
    return "\n".join(lines)


def _outside(link: re.Match[str], here: Path, docs: Path, repo_url: str | None) -> str:
    target = link["target"]
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    path = Path(os.path.normpath(here / target))
    if path.is_relative_to(docs):
        return link[0]
    if not path.exists():
        logger.warning("%s links to %s, which does not exist", here, target)
    name = path.relative_to(docs.parent).as_posix()
    if repo_url:
        return f"[{link['text']}]({repo_url.rstrip('/')}/blob/main/{name})"
    text = link["text"]
    return text if name.rstrip("/") in text.strip("`/") else f"{text} (`{name}`)"
