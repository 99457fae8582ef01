"""A few shapes of SVG, enough for the diagrams of the documentation. Standard library only.

The text is deterministic: equal drawings are equal files, so that a test can compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK, FAINT, PAPER = "#263238", "#78909c", "#ffffff"
BLUE, GREEN, AMBER, RED = "#bbdefb", "#c8e6c9", "#ffe0b2", "#ffcdd2"
FONT = "font-family='system-ui, sans-serif'"
LINE_PX = 17
"""Distance of two lines of text."""


@dataclass
class Drawing:
    """Shapes on a white page of ``width`` by ``height`` pixels; the origin is top left."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, w: int, h: int, text: str = "", *, fill: str = PAPER) -> None:
        """A rounded box with centred lines of text."""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='6' fill='{fill}' stroke='{INK}'/>"
        )
        if text:
            lines = text.split("\n")
            top = y + h // 2 + 5 - (len(lines) - 1) * LINE_PX // 2
            for number, line in enumerate(lines):
                self.text(x + w // 2, top + number * LINE_PX, line, anchor="middle")

    def frame(self, x: int, y: int, w: int, h: int, text: str) -> None:
        """A dashed frame around a machine, its name in the top left corner."""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='8' fill='none' "
            f"stroke='{FAINT}' stroke-dasharray='5 4'/>"
        )
        self.text(x + 10, y + 19, text, colour=FAINT)

    def text(
        self, x: int, y: int, text: str, *, anchor: str = "start", colour: str = INK, size: int = 13
    ) -> None:
        """One line of text; ``y`` is its base line."""
        self.parts.append(
            f"<text x='{x}' y='{y}' text-anchor='{anchor}' font-size='{size}' fill='{colour}' "
            f"{FONT}>{escape(text)}</text>"
        )

    def arrow(self, points: Sequence[tuple[int, int]], *, dashed: bool = False) -> None:
        """A line through the points with a head at the last one."""
        dash = " stroke-dasharray='4 4'" if dashed else ""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f"<polyline points='{path}' fill='none' stroke='{INK}' stroke-width='1.4'{dash} "
            "marker-end='url(#head)'/>"
        )

    def line(self, x1: int, y1: int, x2: int, y2: int) -> None:
        """A thin straight line without a head."""
        self.parts.append(
            f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{FAINT}' stroke-width='1'/>"
        )

    def svg(self) -> str:
        """The file's content."""
        head = (
            "<marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' "
            f"markerHeight='7' orient='auto'><path d='M0 0 L10 5 L0 10 z' fill='{INK}'/></marker>"
        )
        size = f"width='{self.width}' height='{self.height}'"
        return "\n".join(
            (
                f"<svg xmlns='http://www.w3.org/2000/svg' {size} "
                f"viewBox='0 0 {self.width} {self.height}' role='img'>",
                f"<title>{escape(self.title)}</title>",
                f"<defs>{head}</defs>",
                f"<rect {size} fill='{PAPER}'/>",
                *self.parts,
                "</svg>\n",
            )
        )
