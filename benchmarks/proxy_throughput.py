"""Requests per second, CPU and latency of the proxy, beside a direct connection and other proxies.

    python -m benchmarks.proxy_throughput [--seconds 2] [--rounds 3] [--sse] [--text]
        [--delay-ms 20] [--rate 1000]
        [--beside floor recipe nginx vllm-router sglang-router]
        [--nginx PROGRAM] [--vllm-router PROGRAM] [--sglang-router PROGRAM]

Load generator, proxies and two stand-in replicas are processes on this machine, so figures compare
within one run only: the targets take turns, and the median round is shown. Full routing is on
(cache-aware in the routers), except in nginx, the floor and direct connections, which do not route.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.proxy_load import Figures, bodies, measure, upstreams
from benchmarks.proxy_rivals import Target, start_ours, start_rival, stopping

OWN = ("floor", "recipe")
"""Stand-ins of this folder."""
INSTALLED = ("nginx", "vllm-router", "sglang-router")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="time a replica takes")
    parser.add_argument("--rate", type=float, help="requests per second, instead of all that go")
    parser.add_argument("--sse", action="store_true", help="16 events instead of one JSON answer")
    parser.add_argument("--text", action="store_true", help="prompts of text, not of token ids")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8, 32, 128, 384])
    parser.add_argument("--beside", nargs="*", choices=OWN + INSTALLED, default=[])
    for name in INSTALLED:
        parser.add_argument(f"--{name}", metavar="PROGRAM", help="where it is installed")
    args = parser.parse_args()
    with (
        upstreams(2, delay_s=args.delay_ms / 1e3, sse=args.sse) as ports,
        tempfile.TemporaryDirectory() as folder,
    ):
        requests = bodies(sse=args.sse, text=args.text)
        targets = [Target("direct", ports[0])]
        with stopping(targets):
            targets.append(start_ours(ports))
            for name in args.beside:
                program = getattr(args, name.replace("-", "_"), None)
                rival = start_rival(name, program, ports, folder=Path(folder), trial=requests[0])
                if rival is not None:
                    targets.append(rival)
            kind = "16 events" if args.sse else "JSON"
            print(
                f"512-token prompts, 4 KB answers ({kind}) after {args.delay_ms:g} ms", flush=True
            )
            print("target         conns    req/s   p50 ms   p99 ms   CPU µs   RSS MB")
            for connections in args.connections:
                rounds: dict[str, list[Figures]] = {}
                for _ in range(args.rounds):
                    for target in targets:
                        figures = measure(
                            target.port,
                            requests,
                            connections=connections,
                            seconds=args.seconds,
                            rate=args.rate,
                            pids=target.pids,
                        )
                        rounds.setdefault(target.name, []).append(figures)
                for name, rows in rounds.items():
                    show(name, connections, rows)


def show(name: str, connections: int, rows: list[Figures]) -> None:
    """Print the median round."""
    row = sorted(rows, key=lambda figures: figures.per_s)[len(rows) // 2]
    cost = f"{row.cpu_us:8.0f} {row.rss_mb:8.0f}" if row.rss_mb else "       –        –"
    print(
        f"{name:14} {connections:5} {row.per_s:8.0f} {row.p50_ms:8.2f} {row.p99_ms:8.2f} {cost}",
        flush=True,
    )


if __name__ == "__main__":
    main()
