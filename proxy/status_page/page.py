"""The status page as HTML. Every value is escaped here, whoever it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape

from bucket_lora_proxy.recent_errors import RecentError
from bucket_lora_proxy.runs import RunRow
from bucket_lora_proxy.status_page.assets import SCRIPT, STYLE
from bucket_lora_proxy.status_page.sparkline import sparkline
from bucket_lora_proxy.status_page.view import PageView, ReplicaRow

_MAX_SHOWN = 600


def render(view: PageView, now: datetime) -> str:
    """The whole page. Works without script: it then asks the browser to load it again."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>bucket-lora-proxy</title>"
        '<noscript><meta http-equiv="refresh" content="5"></noscript>'
        f"<style>{STYLE}</style></head><body><main>{_main(view, now)}</main>"
        f'<p id="stale">The proxy does not answer; this is what it said last.</p>'
        f"<script>{SCRIPT}</script></body></html>"
    )


def _main(view: PageView, now: datetime) -> str:
    up = sum(row.state != "down" for row in view.replicas)
    note = f'<p class="note">{_text(view.note)}</p>' if view.note else ""
    return (
        f"<header><h1>bucket-lora-proxy</h1><span>{up} of {len(view.replicas)} replicas up</span>"
        f'<span class="dim">{now:%Y-%m-%d %H:%M:%S} UTC</span></header>{note}'
        f"{_numbers(view)}{_replicas(view.replicas)}{_runs(view.runs)}{_errors(view.errors)}"
    )


def _numbers(view: PageView) -> str:
    rate = view.rates[-1] if view.rates else 0.0
    minutes = f"{view.span_s / 60:.0f} min" if view.span_s >= 60 else f"{view.span_s:.0f} s"
    shown = {
        "generations/s": f"{rate:.1f}",
        "in flight": str(sum(row.in_flight for row in view.replicas)),
        "mean time": _or_dash(view.mean_seconds, "{:.2f} s"),
        "prefix affinity": _or_dash(view.affinity, "{:.1%}"),
        "load, max : mean": _or_dash(view.imbalance, "{:.2f}"),
        "hit / spill / new": " / ".join(
            f"{view.outcomes.get(outcome, 0):.0f}" for outcome in ("hit", "spill", "new")
        ),
        "waited for an adapter": f"{view.waits:.0f}",
        "retries": f"{sum(view.retries.values()):.0f}",
        "answers": _counts(view.answers),
    }
    items = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in shown.items()
    )
    top = max(view.rates, default=0.0)
    label = f"generations a second over the last {minutes}, at most {top:.1f}"
    return (
        f'<dl class="numbers">{items}</dl>{sparkline(view.rates, label=_text(label))}'
        f'<div class="dim">{_text(label)}</div>'
    )


def _replicas(rows: list[ReplicaRow]) -> str:
    body = [
        [
            ("", _text(row.url) + f'<div class="dim">{_text(row.base_model)}</div>'),
            (
                "",
                f'<span class="state {_text(row.state)}">{_text(row.state)}</span>'
                f'<div class="dim">{_text(row.reason)}</div>',
            ),
            ("", _text(row.versions) or '<span class="dim">none</span>'),
            ("n", f"{row.in_flight}"),
            ("n", f"{row.outstanding:,.0f}"),
            ("n", f"{row.sent:,.0f}"),
            ("n", f"{row.cached_tokens:,}"),
            ("", _text(row.source)),
        ]
        for row in rows
    ]
    heads = [
        ("", "replica"),
        ("", "state"),
        ("", "versions ready"),
        ("n", "in flight"),
        ("n", "tokens ahead"),
        ("n", "recently sent"),
        ("n", "prefix tokens"),
        ("", "from"),
    ]
    return _table("Replicas", heads, body, "no replica")


def _runs(rows: list[RunRow]) -> str:
    body = [
        [
            ("", _text(row.run_id)),
            ("", _text(row.state)),
            ("n", f"v{row.latest}"),
            ("n", f"v{row.newest_ready} on {row.ready_on} of {row.replicas}"),
            ("n", f"{row.lag}"),
            ("", _text(row.trouble)),
        ]
        for row in rows
    ]
    heads = [
        ("", "run"),
        ("", "state"),
        ("n", "published"),
        ("n", "newest ready"),
        ("n", "lag of the slowest"),
        ("", "trouble"),
    ]
    return _table("Runs", heads, body, "no run is known")


def _errors(errors: list[RecentError]) -> str:
    body = [
        [
            ("", f"{datetime.fromtimestamp(error.last_at, UTC):%H:%M:%S}"),
            ("n", f"{error.count} ×"),
            ("", _text(error.subject)),
            ("", _text(error.text)),
        ]
        for error in errors
    ]
    heads = [("", "last"), ("n", "times"), ("", "what"), ("", "why")]
    return _table("Last errors", heads, body, "none")


def _table(
    title: str, heads: list[tuple[str, str]], body: list[list[tuple[str, str]]], empty: str
) -> str:
    if not body:
        return f'<h2>{title}</h2><p class="dim">{empty}</p>'
    head = "".join(f'<th scope="col" class="{kind}">{text}</th>' for kind, text in heads)
    rows = "".join(f"<tr>{_cells(cells)}</tr>" for cells in body)
    return (
        f'<h2>{title}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cells(cells: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<td class="{kind}">{html}</td>' for kind, html in cells)


def _counts(counts: Mapping[str, float]) -> str:
    shown = [f"{name}: {count:.0f}" for name, count in sorted(counts.items())]
    return ", ".join(shown) or "–"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _text(value: str) -> str:
    return escape(value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}…")
