"""What the names of a run's versions have stood for in this process. Pure.

A name stands for one set of bytes for ever. Who deletes a run by hand and gives its id to another
one breaks that; and a server that lives on holds the old run's adapters under the new one's names,
and in vLLM's prefix cache, which goes by names, what they computed.
"""

from __future__ import annotations

from adapter_bucket.layout import adapter_name
from adapter_bucket.manifest import Manifest, VersionEntry


class Names:
    """The names of one run. Outlives the run, and stays small: it keeps one manifest's digests."""

    def __init__(self) -> None:
        self._highest = 0
        self._digests: dict[int, dict[str, str]] = {}

    def learn(self, manifest: Manifest) -> set[int]:
        """Take over a manifest; return its versions whose names have stood for other bytes.

        A writer only ever adds versions above ``latest``. So one at or below the highest ``latest``
        seen must have been in the manifest before, with the same digests; if not, it is another
        run's. Idempotent.
        """
        found = {entry.version: _digests(entry) for entry in manifest.versions}
        reused = {
            version
            for version, digests in found.items()
            if version <= self._highest and self._digests.get(version) != digests
        }
        self._digests = {v: digests for v, digests in found.items() if v not in reused}
        self._highest = max(self._highest, manifest.latest)
        return reused


def reused_fault(run_id: str, version: int) -> str:
    """Why a version is refused whose name has stood for other bytes."""
    return (
        f"the name {adapter_name(run_id, version)} stood for other bytes here before: the run was "
        "deleted and its id used again; choose another run id, or restart this server"
    )


def _digests(entry: VersionEntry) -> dict[str, str]:
    return {name: file.sha256 for name, file in entry.files.items()}
