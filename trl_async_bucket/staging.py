"""Keeps the files of a checkpoint alive while they are uploaded.

The trainer deletes old checkpoints (``save_total_limit``) whenever it saves, also one whose upload
is not over. A hard link costs microseconds a file, takes no room, and outlives the deletion.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
import uuid
from pathlib import Path

logger = logging.getLogger(__name__)

STAGE_DIR = "_bucket-checkpoints"
"""Below the output directory, so that links are possible. The underscore keeps it from being pushed
to the Hub with the output directory."""

_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def stage(checkpoint: Path) -> Path:
    """Link the files of ``checkpoint`` into a directory of their own; copy where links cannot be.

    Links to elsewhere are staged as links: the upload refuses them by name.

    Returns:
        The directory; ``discard`` it after the upload.

    Raises:
        OSError: the disk is full, or the checkpoint is not there.
    """
    started = time.monotonic()
    target = checkpoint.parent / STAGE_DIR / f"{checkpoint.name}-{uuid.uuid4().hex[:8]}"
    target.parent.mkdir(exist_ok=True)
    try:
        copied = _link_tree(checkpoint, target)
    except BaseException:
        discard(target)
        raise
    if copied:
        logger.warning(
            "%s allows no hard links: %d bytes of %s were copied in %.1f s, for which training "
            "waited",
            checkpoint.parent,
            copied,
            checkpoint.name,
            time.monotonic() - started,
        )
    return target


def discard(staged: Path) -> None:
    """Remove a staged directory."""
    shutil.rmtree(staged, ignore_errors=True)


def discard_leftovers(output_dir: Path) -> None:
    """Remove what a killed trainer staged in the same output directory."""
    shutil.rmtree(output_dir / STAGE_DIR, ignore_errors=True)


def _link_tree(source: Path, target: Path) -> int:
    """Returns how many bytes had to be copied."""
    copied = 0
    target.mkdir()
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                copied += _link_tree(Path(entry.path), target / entry.name)
                continue
            try:
                os.link(entry.path, target / entry.name, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                shutil.copy2(entry.path, target / entry.name, follow_symlinks=False)
                copied += entry.stat(follow_symlinks=False).st_size
    return copied
