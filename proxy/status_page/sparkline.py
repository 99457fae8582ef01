"""A line of numbers as inline SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 600, 60


def sparkline(values: Sequence[float], *, label: str) -> str:
    """Draw the values from left (old) to right (new), scaled to the largest one.

    Args:
        values: any numbers from 0.
        label: what a screen reader says; must be escaped already.
    """
    head = (
        f'<svg class="spark" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{label}">'
    )
    if len(values) < 2:
        return head + "</svg>"
    top = max(max(values), 1e-9)
    step = WIDTH / (len(values) - 1)
    points = [
        f"{number * step:.1f},{HEIGHT - 2 - value / top * (HEIGHT - 4):.1f}"
        for number, value in enumerate(values)
    ]
    line = " ".join(points)
    area = f"0,{HEIGHT} {line} {WIDTH},{HEIGHT}"
    return f'{head}<polygon points="{area}"/><polyline points="{line}"/></svg>'
