"""Style and script of the page, inline, and the policy that allows these two and nothing else."""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; --good: #1a7f37; --bad: #c62828;
  --warn: #b26a00; --ink: #2962c4; }
@media (prefers-color-scheme: dark) { :root { --dim: #999; --good: #4ac26b; --bad: #ff7b72;
  --warn: #e3a13b; --ink: #79a8ff; } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 1rem; }
h1 { font-size: 1.2rem; margin: 0; } h2 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
header { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; }
.dim, caption { color: var(--dim); }
.numbers { display: flex; flex-wrap: wrap; gap: .4rem 2.2rem; margin: 1rem 0 .4rem; padding: 0; }
.numbers div { display: flex; flex-direction: column; }
.numbers dt { color: var(--dim); font-size: .8rem; } .numbers dd { margin: 0; font-size: 1.3rem; }
.spark { width: 100%; height: 60px; border-bottom: 1px solid var(--line); }
.spark polyline { fill: none; stroke: var(--ink); stroke-width: 1.5;
  vector-effect: non-scaling-stroke; }
.spark polygon { fill: var(--ink); opacity: .15; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; white-space: nowrap; } td.n, th.n { text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.state { font-weight: 600; } .up { color: var(--good); } .down, .failing { color: var(--bad); }
.starting, .draining, .held { color: var(--warn); } .note { color: var(--warn); }
.stale main { opacity: .45; } #stale { color: var(--bad); display: none; }
.stale #stale { display: inline; }
"""

SCRIPT = """
(() => {
  // Built anew: an address that was opened as user:token@host must not be fetched as it is.
  const address = location.origin + location.pathname;
  async function refresh() {
    if (document.hidden) return;
    try {
      const answer = await fetch(address, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      document.querySelector("main").replaceWith(
        document.adoptNode(page.querySelector("main")));
      document.body.classList.remove("stale");
    } catch {
      document.body.classList.add("stale");
    }
  }
  setInterval(refresh, 2000);
})();
"""


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_source(STYLE)}",
        f"script-src {_source(SCRIPT)}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy: were a value ever not escaped, it still could not run or load."""

HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
