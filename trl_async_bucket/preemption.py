"""SIGTERM, the notice before a machine is taken away: what arrives when, and who ends the process.

Owns the signal handler and the deadline; knows nothing of trainers. A notice sets a flag, which the
trainer looks at between two steps; where it only waits for something, the notice raises
``Preempted`` out of the wait. Whatever happens, the process ends at the deadline.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM

SAME_NOTICE_S = 2.0
"""A second SIGTERM within this time is the same notice, forwarded: systemd signals a whole group of
processes, and torchrun in it passes its own on. A later one ends the process at once."""

LAST_SHARE = 0.2
LAST_MAX_S = 5.0
"""The last part of the grace time, kept for marking the run interrupted from another thread if the
trainer comes to no step boundary before."""


TELL_S = 1.0
"""Longest time that a line of the log may take from the grace time."""


class Preempted(SystemExit):
    """Ends training after a SIGTERM, and the process with 128 + 15 unless somebody catches it.

    A ``SystemExit``, so that ``except Exception`` in a training script does not swallow it.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class SigtermWatch:
    """Watches for SIGTERM between ``install`` and ``uninstall``.

    Args:
        grace_s: From the notice to the end of the process.
        on_last_call: Called once on a thread of its own, shortly before the deadline, if the
            trainer has not said ``settled`` by then.
        end: Ends the process; another one in tests.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        on_last_call: Callable[[float], None],
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._grace_s = grace_s
        self._on_last_call = on_last_call
        self._end = end
        self._noticed = False
        self._unstarted = threading.Lock()
        """Free until the deadline's thread is started."""
        self._settled = threading.Event()
        self._closing = False
        self._notice_at = 0.0
        self._zones: list[bool] = []
        self._raised = False
        self._previous: Any = None
        self._installed = False
        self._pipe: tuple[int, int] | None = None

    @property
    def noticed(self) -> bool:
        """Whether SIGTERM arrived."""
        return self._noticed

    @property
    def left_s(self) -> float:
        """Seconds that work may still take after a notice: without the last part. Never below 0."""
        reserve_s = min(LAST_MAX_S, LAST_SHARE * self._grace_s)
        return max(0.0, self._notice_at + self._grace_s - reserve_s - time.monotonic())

    def install(self) -> bool:
        """Take SIGTERM over, if that is possible; says whether it was.

        Not in another thread than the main one (Python allows no handlers there), and not where
        SIGTERM is ignored, or handled by something outside of Python.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.info("SIGTERM is not watched: training does not run in the main thread")
            return False
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None or previous is signal.SIG_IGN:
            logger.info("SIGTERM is not watched: it is ignored, or handled outside of Python")
            return False
        self._previous = previous
        signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        self._listen()
        _INSTALLED.add(self)
        return True

    def uninstall(self) -> None:
        """Give SIGTERM back to its former handler, and call that if a notice had arrived.

        After a notice the deadline stays: what the script still does must end by then as well.
        """
        if not self._installed:
            return
        self._installed = False
        _INSTALLED.discard(self)
        signal.signal(signal.SIGTERM, self._previous)
        self._stop_listening()
        if self.noticed and callable(self._previous):
            self._previous(signal.SIGTERM, None)

    def forget_in_child(self) -> None:
        """After a fork: the signal is the parent's business.

        A data loader ends its workers with SIGTERM. One that inherited the handler would live on,
        and, worse, tell the parent through the shared pipe that *it* was to end.
        """
        self._installed = False
        signal.signal(signal.SIGTERM, self._previous)
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)

    def notice(self) -> None:
        """Take a notice that another rank, or the handler, got. The first one starts the clock."""
        if self._noticed:
            return
        self._notice_at = time.monotonic()
        self._noticed = True
        # The handler, the listener and the trainer may come here at once. Nothing is waited for:
        # the handler may have cut the very call that would have to go on.
        if self._unstarted.acquire(blocking=False):
            threading.Thread(
                target=self._keep_deadline, name="bucket-deadline", daemon=True
            ).start()

    def settled(self) -> None:
        """The trainer has done what is to be done: no last call."""
        self._settled.set()

    @contextmanager
    def interruptible(self, allowed: bool = True) -> Iterator[None]:
        """Within, a notice raises ``Preempted`` at once. For waits that leave nothing half done.

        Args:
            allowed: False makes it a stretch that a notice must not cut, inside a wait.
        """
        self._zones.append(allowed)
        try:
            self._raise_if_open()
            yield
        finally:
            self._zones.pop()
        self._raise_if_open()

    def _raise_if_open(self) -> None:
        # Once: what is done about it afterwards must not be cut by the same notice.
        if self.noticed and not self._raised and self._zones and self._zones[-1]:
            self._raised = True
            raise Preempted

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # In the main thread, between two byte codes. The listener may have been faster.
        if self._pipe is None:
            self._count()
        self.notice()
        self._raise_if_open()

    def _count(self) -> None:
        """First notice, the same again, or a second one."""
        if not self.noticed:
            self.notice()
        elif time.monotonic() - self._notice_at > SAME_NOTICE_S:
            self._exit("a second SIGTERM: the process ends now")

    def _listen(self) -> None:
        """Let the kernel's delivery be seen at once, also while the main thread is inside torch.

        A Python handler runs only between two byte codes of the main thread; a collective that
        waits for a dead rank never comes to one. The wakeup descriptor is written by the C handler.
        """
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:  # an event loop uses it
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._pipe = (read, write)
        threading.Thread(
            target=self._read_signals, args=(read,), name="bucket-sigterm", daemon=True
        ).start()

    def _stop_listening(self) -> None:
        if self._pipe is None:
            return
        _, write = self._pipe
        self._pipe = None
        if signal.set_wakeup_fd(-1) != write:
            logger.warning("the wakeup descriptor of signals was replaced by other code")
        os.close(write)  # ends the thread, which closes the other end

    def _read_signals(self, read: int) -> None:
        while numbers := os.read(read, 64):
            for number in numbers:
                if number == signal.SIGTERM:
                    self._count()
        os.close(read)

    def _keep_deadline(self) -> None:
        _tell(
            f"SIGTERM: training stops at the next step boundary; the process ends within "
            f"{self._grace_s:.0f} s"
        )
        self._settled.wait(self.left_s)
        if not self._settled.is_set():
            thread = threading.Thread(target=self._last_call, name="bucket-last", daemon=True)
            thread.start()
            thread.join(self._until_deadline_s())
        time.sleep(self._until_deadline_s())
        self._exit(f"{self._grace_s:.0f} s after SIGTERM: the process ends now")

    def _last_call(self) -> None:
        try:
            self._on_last_call(self._until_deadline_s())
        except Exception as error:  # nobody is left to raise it to
            logger.error("the run could not be closed before the deadline: %s", error)

    def _until_deadline_s(self) -> float:
        return max(0.0, self._notice_at + self._grace_s - time.monotonic())

    def _exit(self, why: str) -> None:
        _tell(why)
        self._end(EXIT_CODE)


def _tell(text: str) -> None:
    """Log, and flush the standard streams, for ``TELL_S`` at most.

    On a thread of its own: the main thread may be inside a write to the same stream, for ever if
    nobody reads it any more, and holds the locks of logging then.
    """

    def tell() -> None:
        logger.warning("%s", text)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    thread = threading.Thread(target=tell, name="bucket-notice", daemon=True)
    thread.start()
    thread.join(TELL_S)


_INSTALLED: set[SigtermWatch] = set()


def _forget_in_child() -> None:
    for watch in list(_INSTALLED):
        watch.forget_in_child()
    _INSTALLED.clear()


os.register_at_fork(after_in_child=_forget_in_child)
