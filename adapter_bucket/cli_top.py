"""``bucket-lora top``: a live view of one run, from the bucket and, if asked, its proxy."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from adapter_bucket.cli_text import plain, table
from adapter_bucket.errors import BucketError, NotPublished, StoreUnavailable
from adapter_bucket.fetch import RunReader, discover_runs
from adapter_bucket.heartbeat import HeartbeatReader
from adapter_bucket.manifest import Manifest, RunState
from adapter_bucket.proxy_metrics import ProxySample, read_proxy
from adapter_bucket.store import Store
from adapter_bucket.top_frame import proxy_part, replica_part, run_part

MIN_INTERVAL_S = 0.2


def top(store: Store, arguments: argparse.Namespace, console: Console) -> tuple[Any, bool]:
    """Show a run until Ctrl-C; one frame with ``--once``, ``--json``, or where no terminal is."""
    if arguments.json or arguments.once or not console.is_terminal:
        frame = _View(store, arguments.run, arguments.proxy).read()
        if not arguments.json:
            console.print(_shown(frame))
        return frame, True
    view: _View | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                view = view or _View(store, arguments.run, arguments.proxy)
                live.update(_shown(view.read()), refresh=True)
            except NotPublished as error:  # people start this before the trainer
                live.update(plain(f"waiting: {error}"), refresh=True)
            time.sleep(max(MIN_INTERVAL_S, arguments.interval))


class _View:
    """Reads again and again; what cannot be read for a while stays, with the reason beside it."""

    def __init__(self, store: Store, run: str | None, proxy: str | None) -> None:
        run_id = self._run_id = run or _newest_running(store)
        self._store = store
        self._reader = RunReader(store, run_id)
        self._heartbeats = HeartbeatReader(store, run_id)
        self._proxy = proxy
        self._sample: ProxySample | None = None
        self._frame: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The next frame.

        Raises:
            BucketError: the very first one could not be read.
        """
        faults: list[str] = []
        try:
            self._reader.poll()
            manifest = self._reader.manifest
            if manifest is None:
                raise NotPublished(f"run {self._run_id!r} has no manifest in {self._store.url}")
            self._frame |= run_part(manifest, now=time.time())
            self._frame["replicas"] = replica_part(self._heartbeats.poll(), manifest)
        except BucketError as error:
            if not self._frame:
                raise
            faults.append(str(error))
        if self._proxy:
            faults += self._read_proxy(self._proxy)
        self._frame["faults"] = faults
        return dict(self._frame)

    def _read_proxy(self, url: str) -> list[str]:
        try:
            sample = read_proxy(url)
        except StoreUnavailable as error:
            self._sample = None
            self._frame["proxy"] = None
            return [str(error)]
        self._frame["proxy"] = proxy_part(sample, self._sample, run_id=self._run_id)
        self._sample = sample
        return []


def _newest_running(store: Store) -> str:
    """The run with the newest version, of those that are running if there are any."""
    found: list[Manifest] = []
    for run_id in discover_runs(store):
        reader = RunReader(store, run_id)
        try:
            reader.poll()
        except BucketError:
            continue  # `bucket-lora runs` tells of those that cannot be read
        if reader.manifest is not None:
            found.append(reader.manifest)
    if not found:
        raise NotPublished(f"no run in {store.url} can be shown; `bucket-lora runs` lists them")

    def newness(manifest: Manifest) -> tuple[bool, float]:
        newest = manifest.versions[-1].created_at if manifest.versions else 0.0
        return manifest.state is RunState.RUNNING, newest

    return max(found, key=newness).run_id


def _shown(frame: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [_run_text(frame), Text(), _replica_table(frame["replicas"])]
    if frame.get("proxy"):
        parts += [Text(), _proxy_text(frame["proxy"])]
    parts += [plain(fault, style="red") for fault in frame["faults"]]
    return Group(*parts)


def _run_text(frame: dict[str, Any]) -> Text:
    lines = [
        f"{frame['run']}  {frame['state']}  base model {frame['base_model']}",
        f"version {frame['latest']}  step {_or_dash(frame['step'])}  published "
        f"{_or_dash(frame['age_s'], ' s ago')}  {_or_dash(frame['weights_bytes'], ' bytes')}  "
        f"kept {_ranges(frame['kept'])}  window {frame['window']}",
        f"pace  {_or_dash(frame['versions_per_min'])} versions/min  "
        f"{_or_dash(frame['steps_per_min'])} steps/min  writer {frame['writer']} "
        f"(epoch {frame['epoch']})",
    ]
    return Text("\n").join(plain(line) for line in lines)


def _replica_table(replicas: list[dict[str, Any]]) -> RenderableType:
    if not replicas:
        return Text("no replica writes heartbeats for this run", style="yellow")
    shown: Table = table("replica", "url", "ready", "lag", "in flight", "heard", "trouble")
    for one in replicas:
        heard = f"{one['unchanged_s']} s ago" if one["alive"] else "gone"
        style = "dim" if not one["alive"] else "yellow" if one["lag"] > 1 else ""
        cells = (one["replica"], one["url"], _ranges(one["ready"]), one["lag"], one["in_flight"],
                 heard, one["trouble"])  # fmt: skip
        shown.add_row(*map(plain, cells), style=style)
    return shown


def _proxy_text(proxy: dict[str, Any]) -> Text:
    lines = [
        f"proxy  {proxy['up']} up, {proxy['down']} down  {_or_dash(proxy['requests_per_s'])} "
        f"requests/s  {_or_dash(proxy['prompt_tokens_per_s'])} prompt tokens/s  lag "
        f"{_or_dash(proxy['lag'])}",
        f"in flight {proxy['in_flight']}  outstanding {proxy['outstanding_tokens']} tokens  "
        f"affinity {_or_dash(proxy['affinity'])}  retries {proxy['retries']}  waited for a "
        f"version {proxy['adapter_waits']}  of {proxy['requests']} requests",
        *(f"  {url}  {count} in flight" for url, count in proxy["in_flight_by_replica"].items()),
    ]
    return Text("\n").join(plain(line) for line in lines)


def _or_dash(value: object, unit: str = "") -> str:
    return "–" if value is None else f"{value}{unit}"


def _ranges(versions: list[int]) -> str:
    """``1-3, 5`` for 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and version == runs[-1][-1] + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    shown = (str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return ", ".join(shown) or "–"
