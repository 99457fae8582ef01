"""The ``bucket-lora`` commands about runs. Each returns (what ``--json`` prints, is all well).

Text from the bucket is printed as text, never as markup or terminal codes.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from adapter_bucket.adapter_files import adapter_faults
from adapter_bucket.cli_text import plain as _text
from adapter_bucket.cli_text import table as _table
from adapter_bucket.errors import BucketError, ConfigError, NotPublished
from adapter_bucket.fetch import RunReader, discover_runs, fetch_version
from adapter_bucket.heartbeat import HeartbeatReader
from adapter_bucket.layout import CONFIG_FILE, WEIGHTS_FILE, check_run_id, file_key
from adapter_bucket.lifecycle import collect, delete_run, finish_run
from adapter_bucket.manifest import Manifest, VersionEntry
from adapter_bucket.servable import servable_faults
from adapter_bucket.store import Store, StoredObject
from adapter_bucket.verified import verify_file

Answer = tuple[Any, bool]


def runs(store: Store, arguments: argparse.Namespace, console: Console) -> Answer:
    """List every run of the bucket."""
    found = [_summary(store, run_id) for run_id in discover_runs(store)]
    table = _table("run", "state", "latest", "kept", "window", "epoch", "base model", "writer")
    for one in found:
        keys = ("run", "state", "latest", "kept", "window", "epoch", "base_model", "writer")
        table.add_row(*(_text(one.get(key, "")) for key in keys))
    if not arguments.json:
        console.print(table if found else f"no runs in {store.url}")
    return found, all("error" not in one for one in found)


def show(store: Store, arguments: argparse.Namespace, console: Console) -> Answer:
    """Show one run; with ``--watch`` again whenever something changed."""
    reader, replicas = RunReader(store, arguments.run), HeartbeatReader(store, arguments.run)
    result: dict[str, Any] = {}
    while True:
        reader.poll()
        manifest = reader.manifest
        if manifest is None:
            raise NotPublished(f"run {arguments.run!r} has no manifest in {store.url}")
        shown = _run(manifest, replicas)
        if shown != result and not arguments.json:
            if arguments.watch:
                console.clear()
            _print_run(shown, console)
        result = shown
        if not arguments.watch:
            return result, True
        time.sleep(max(0.1, arguments.interval))


def verify(store: Store, arguments: argparse.Namespace, console: Console) -> Answer:
    """Read every version again, and check digests, structure and values."""
    manifest = _manifest(store, arguments.run)
    found = []
    with tempfile.TemporaryDirectory(prefix="bucket-lora-") as folder:
        for entry in manifest.versions:
            faults = _faults(store, arguments.run, entry, Path(folder))
            found.append({"version": entry.version, "faults": faults})
            if not arguments.json:
                console.print(_text(f"v{entry.version}: {'; '.join(faults) or 'ok'}"))
    return found, not any(one["faults"] for one in found)


def export(store: Store, arguments: argparse.Namespace, console: Console) -> Answer:
    """Write one version as a plain PEFT directory."""
    manifest = _manifest(store, arguments.run)
    wanted = str(arguments.version)
    number = manifest.latest if wanted == "latest" else int(wanted) if wanted.isdigit() else 0
    entry = manifest.entry(number)
    if entry is None:
        kept = ", ".join(str(one.version) for one in manifest.versions) or "none"
        raise NotPublished(f"run {arguments.run!r} has no version {wanted!r}; kept are {kept}")
    target = Path(arguments.directory)
    if target.exists():
        raise ConfigError(f"{target} exists already; name a new directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bucket-lora-", dir=target.parent) as folder:
            shutil.move(fetch_version(store, arguments.run, entry, Path(folder)), target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    if not arguments.json:
        console.print(_text(f"version {number} of {arguments.run} is in {target}"))
    return {"run": arguments.run, "version": number, "directory": str(target)}, True


def collect_garbage(store: Store, arguments: argparse.Namespace, console: Console) -> Answer:
    """Remove what no manifest names."""
    garbage = collect(
        store, arguments.run, older_than_s=arguments.older_than, dry_run=arguments.dry_run
    )
    if not arguments.json:
        verb = "would remove" if arguments.dry_run else "removed"
        for key in garbage.keys:
            console.print(_text(f"{verb} {key}"))
        console.print(
            _text(
                f"{verb} {len(garbage.keys)} objects, {garbage.size_bytes} bytes, "
                f"{garbage.leftovers} unfinished writes"
            )
        )
    return {
        "keys": garbage.keys,
        "size_bytes": garbage.size_bytes,
        "leftovers": garbage.leftovers,
        "dry_run": arguments.dry_run,
    }, True


def finish(store: Store, arguments: argparse.Namespace, console: Console) -> Answer:
    """Mark a run finished."""
    finish_run(store, arguments.run, by=_operator())
    if not arguments.json:
        console.print(_text(f"run {arguments.run} is finished; its trainer, if any, is fenced"))
    return {"run": arguments.run, "state": "finished"}, True


def delete(store: Store, arguments: argparse.Namespace, console: Console) -> Answer:
    """Delete a run."""
    if not arguments.yes:
        raise ConfigError(f"run {arguments.run!r} would be deleted for good; repeat with --yes")
    count = delete_run(store, arguments.run, by=_operator(), purge=arguments.purge)
    if not arguments.json:
        console.print(_text(f"deleted {count} objects of run {arguments.run}"))
    return {"run": arguments.run, "deleted": count, "purged": arguments.purge}, True


def _summary(store: Store, run_id: str) -> dict[str, Any]:
    try:
        manifest = _manifest(store, run_id)
    except BucketError as error:
        return {"run": run_id, "state": f"{type(error).__name__}", "error": str(error)}
    return {
        "run": run_id,
        "state": manifest.state.value,
        "latest": manifest.latest,
        "kept": len(manifest.versions),
        "window": manifest.window,
        "epoch": manifest.writer.epoch,
        "base_model": manifest.base_model.id,
        "writer": manifest.writer.id,
    }


def _run(manifest: Manifest, replicas: HeartbeatReader) -> dict[str, Any]:
    window = {entry.version for entry in manifest.window_versions()}
    return {
        "run": manifest.run_id,
        "state": manifest.state.value,
        "latest": manifest.latest,
        "window": manifest.window,
        "base_model": manifest.base_model.id,
        "writer": manifest.writer.model_dump(mode="json", include={"id", "epoch"}),
        "signed_by": manifest.signature.key_id if manifest.signature else None,
        "versions": [
            {
                "version": entry.version,
                "step": entry.step,
                "created_at": entry.created_at,
                "size_bytes": sum(file.size for file in entry.files.values()),
                "rank": entry.rank,
                "dtype": entry.dtype,
                "in_window": entry.version in window,
            }
            for entry in manifest.versions
        ],
        "checkpoints": [
            entry.model_dump(include={"step", "epoch", "created_at", "size"})
            for entry in manifest.checkpoints
        ],
        "replicas": [
            {
                "replica": name,
                "url": seen.heartbeat.url,
                "ready": seen.heartbeat.status.ready,
                "error": seen.heartbeat.status.error,
                "alive": seen.alive,
            }
            for name, seen in replicas.poll().items()
        ],
    }


def _print_run(shown: dict[str, Any], console: Console) -> None:
    console.print(
        _text(
            f"{shown['run']}: {shown['state']}, latest {shown['latest']}, window "
            f"{shown['window']}, base model {shown['base_model']}, writer "
            f"{shown['writer']['id']} (epoch {shown['writer']['epoch']})"
        )
    )
    table = _table("version", "step", "bytes", "rank", "dtype", "created", "in window")
    for one in shown["versions"]:
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one["created_at"]))
        cells = (one["version"], one["step"], one["size_bytes"], one["rank"], one["dtype"])
        table.add_row(*map(_text, cells), created, "yes" if one["in_window"] else "")
    console.print(table)
    if shown["checkpoints"]:
        table = _table("checkpoint", "epoch", "bytes", "created")
        for one in shown["checkpoints"]:
            created = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one["created_at"]))
            table.add_row(*map(_text, (one["step"], one["epoch"], one["size"], created)))
        console.print(table)
    if shown["replicas"]:
        table = _table("replica", "url", "ready", "alive", "error")
        for one in shown["replicas"]:
            ready, error = ", ".join(one["ready"]), one["error"] or ""
            table.add_row(*map(_text, (one["replica"], one["url"], ready, one["alive"], error)))
        console.print(table)


def _faults(store: Store, run_id: str, entry: VersionEntry, folder: Path) -> list[str]:
    try:
        path = fetch_version(store, run_id, entry, folder)
        # A reader makes the config from the manifest; here the object itself is read as well.
        key = file_key(run_id, entry.version, CONFIG_FILE)
        config = store.get(key, max_bytes=entry.files[CONFIG_FILE].size)
        copy = folder / "config"
        copy.write_bytes(config.data if isinstance(config, StoredObject) else b"")
        verify_file(copy, entry.files[CONFIG_FILE], key)
        weights = (path / WEIGHTS_FILE).read_bytes()
        shutil.rmtree(path)
    except BucketError as error:
        return [str(error)]
    checked = adapter_faults(
        weights, entry.adapter_config, dtype=entry.dtype, rank=entry.rank, trained=entry.step > 0
    )
    return [*servable_faults(entry.adapter_config), *checked]


def _manifest(store: Store, run_id: str) -> Manifest:
    manifest = RunReader(store, check_run_id(run_id)).poll()
    if manifest is None:
        raise NotPublished(f"run {run_id!r} has no manifest in {store.url}")
    return manifest


def _operator() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}"
