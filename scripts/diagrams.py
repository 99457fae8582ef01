"""Draw the diagrams of the documentation: ``python -m scripts.diagrams``.

This file is their source; ``tests/unit/docs`` holds the files in ``docs/images`` against it.
"""

from __future__ import annotations

from pathlib import Path

from scripts.svg import AMBER, BLUE, FAINT, GREEN, RED, Drawing

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


def overview() -> Drawing:
    """The parts, the machines they run on, and what passes between them."""
    d = Drawing(860, 330, "Trainer, bucket, replicas and proxy")
    d.frame(10, 10, 300, 310, "trainer machine")
    d.frame(550, 10, 300, 310, "replica machines: any number, anywhere")
    d.box(30, 45, 120, 42, "optimizer step", fill=BLUE)
    d.box(170, 45, 120, 42, "snapshot (ms)", fill=BLUE)
    d.box(170, 125, 120, 42, "publisher\n(background)", fill=BLUE)
    d.box(30, 255, 120, 42, "rollout worker", fill=BLUE)
    d.box(170, 255, 120, 42, "proxy", fill=AMBER)
    d.box(365, 105, 130, 82, "bucket\nmanifest.json\nadapters/v12/…", fill=GREEN)
    d.box(570, 45, 260, 42, "watcher: poll the manifest", fill=BLUE)
    d.box(570, 125, 260, 42, "fetch, verify, load, probe", fill=BLUE)
    d.box(570, 255, 260, 42, "vLLM: run-v10, run-v11, run-v12", fill=AMBER)
    d.arrow([(150, 66), (170, 66)])
    d.arrow([(230, 87), (230, 125)])
    d.arrow([(290, 146), (365, 146)])
    d.text(327, 138, "publish", anchor="middle", colour=FAINT, size=12)
    d.arrow([(570, 66), (530, 66), (530, 128), (495, 128)])
    d.text(522, 58, "304", anchor="middle", colour=FAINT, size=12)
    d.arrow([(495, 164), (570, 150)])
    d.arrow([(700, 87), (700, 125)])
    d.arrow([(700, 167), (700, 255)])
    d.text(710, 215, "ready", colour=FAINT, size=12)
    d.arrow([(150, 276), (170, 276)])
    d.arrow([(290, 276), (570, 276)])
    d.text(430, 268, "HTTPS: “model”: “run-v12”", anchor="middle", colour=FAINT, size=12)
    d.text(430, 294, "only where run-v12 is ready", anchor="middle", colour=FAINT, size=12)
    d.arrow([(230, 167), (230, 255)], dashed=True)
    d.text(240, 215, "ready?", colour=FAINT, size=12)
    return d


def sync() -> Drawing:
    """Who waits for what in a sync, here and where replicas are paused."""
    d = Drawing(860, 330, "A sync in time: over the bucket, and with a pause")
    d.text(10, 24, "over the bucket: nobody waits but for the snapshot", size=14)
    _lane(d, 40, "optimizer", [(110, 180, BLUE, "step 11"), (290, 14, RED, ""),
                               (304, 180, BLUE, "step 12"), (484, 14, RED, ""),
                               (498, 180, BLUE, "step 13")])  # fmt: skip
    _lane(d, 75, "publisher", [(304, 70, GREEN, "upload"), (374, 96, GREEN, "await ready")])
    _lane(d, 110, "replica", [(374, 46, AMBER, "fetch"), (420, 50, AMBER, "load")])
    _lane(d, 145, "generation", [(110, 360, GREEN, "run-v11 (in-flight rollouts keep it)"),
                                 (470, 208, GREEN, "run-v12")])  # fmt: skip
    d.text(292, 92, "snapshot", anchor="end", colour=FAINT, size=12)
    d.line(297, 68, 297, 92)
    d.line(10, 202, 850, 202)
    d.text(10, 226, "pause, push, resume: everybody waits for the slowest", size=14)
    _lane(d, 240, "optimizer", [(110, 180, BLUE, "step 11"), (290, 230, RED, "waits"),
                                (520, 158, BLUE, "step 12")])  # fmt: skip
    _lane(d, 275, "generation", [(110, 180, GREEN, "policy 11"), (290, 230, RED, "paused"),
                                 (520, 158, GREEN, "policy 12")])  # fmt: skip
    d.text(700, 290, "time →", colour=FAINT, size=12)
    d.text(700, 160, "time →", colour=FAINT, size=12)
    return d


def version_life() -> Drawing:
    """States of a version on a replica, and what ends each."""
    d = Drawing(860, 250, "The life of a version on a replica")
    names = ("published", "fetching", "verifying", "loading", "probing", "ready", "retired")
    fills = (GREEN, BLUE, BLUE, BLUE, BLUE, GREEN, AMBER)
    for number, (name, fill) in enumerate(zip(names, fills, strict=True)):
        d.box(10 + number * 122, 60, 98, 40, name, fill=fill)
        if number:
            d.arrow([(10 + number * 122 - 24, 80), (10 + number * 122, 80)])
    d.arrow([(303, 60), (303, 34), (181, 34), (181, 60)], dashed=True)
    d.text(242, 26, "other bytes: again", anchor="middle", colour=FAINT, size=12)
    d.box(376, 170, 220, 40, "refused, with the reason", fill=RED)
    d.arrow([(425, 100), (425, 170)])
    d.text(418, 140, "does not fit", anchor="end", colour=FAINT, size=12)
    d.arrow([(547, 100), (547, 170)])
    d.text(555, 140, "computes something else", colour=FAINT, size=12)
    d.text(742, 130, "left the window;", colour=FAINT, size=12)
    d.text(742, 146, "files go when no", colour=FAINT, size=12)
    d.text(742, 162, "request uses them", colour=FAINT, size=12)
    d.text(59, 50, "in the manifest", anchor="middle", colour=FAINT, size=12)
    d.text(669, 50, "may be asked for", anchor="middle", colour=FAINT, size=12)
    return d


def commit() -> Drawing:
    """The order of writes of a publish, and what a crash leaves at each point."""
    d = Drawing(860, 230, "Order of writes: objects first, the manifest last")
    d.box(20, 70, 210, 50, "1. put both files\nIf-None-Match: *", fill=BLUE)
    d.box(320, 70, 220, 50, "2. replace the manifest\nIf-Match: the commit", fill=GREEN)
    d.box(630, 70, 210, 50, "3. delete what left\nthe window", fill=BLUE)
    d.arrow([(230, 95), (320, 95)])
    d.arrow([(540, 95), (630, 95)])
    d.text(430, 40, "readers see version N from here on, whole", anchor="middle")
    d.line(540, 48, 540, 70)
    for x, lines in (
        (125, ("killed here:", "files that no manifest names;", "number N is never used again")),
        (430, ("killed here:", "version N is there or is not;", "the writer reads, and knows")),
        (735, ("killed here:", "old files stay;", "removed at the next start")),
    ):
        for number, line in enumerate(lines):
            d.text(x, 155 + 17 * number, line, anchor="middle", colour=FAINT, size=12)
    return d


def _lane(d: Drawing, y: int, name: str, spans: list[tuple[int, int, str, str]]) -> None:
    d.text(10, y + 18, name)
    for x, w, fill, text in spans:
        d.box(x, y, w, 26, text, fill=fill)


DIAGRAMS = {
    "overview.svg": overview,
    "sync.svg": sync,
    "version-life.svg": version_life,
    "commit.svg": commit,
}


def main() -> None:
    """Write all diagrams."""
    for name, draw in DIAGRAMS.items():
        (IMAGES / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
