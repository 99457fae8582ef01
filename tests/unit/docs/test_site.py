from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from scripts.diagrams import DIAGRAMS
from tests.unit.docs.conftest import ROOT

_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that make a browser fetch something, with the attribute that says what."""


class _Loaded(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        value = dict(attrs).get(_LOADING.get(tag, ""))
        if value is not None:
            self.found.append(value)


def test_every_page_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    sources = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert sources <= {page.relative_to(site).with_suffix(".md") for page in pages}
    for page in pages:
        parser = _Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.found, f"{page.name}: a page without a style sheet is not one of the theme's"
        foreign = [url for url in parser.found if re.match(r"(https?:)?//", url)]
        assert not foreign, f"{page.relative_to(site)} loads {foreign}"
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*", style.read_text(encoding="utf-8"))


def test_every_decision_is_listed(site: Path) -> None:
    shown = (site / "decisions" / "index.html").read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"):
        assert f'href="{path.with_suffix(".html").name}"' in shown, path.name


def test_every_page_is_two_hops_from_the_readme() -> None:
    start = [ROOT / "README.md", ROOT / "docs" / "index.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in start)
    assert "docs/index.md" in start[0].read_text(encoding="utf-8")
    pages = (ROOT / "docs").glob("*.md")
    assert not [page.name for page in pages if f"{page.name})" not in text]


def test_diagrams_are_what_their_source_draws() -> None:
    for name, draw in DIAGRAMS.items():
        committed = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        assert committed == draw().svg(), f"{name} is stale: run python -m scripts.diagrams"
