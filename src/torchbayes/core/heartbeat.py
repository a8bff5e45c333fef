"""Who of the processes of a run still lives: every one says so once a second, and the others can look.

A process that has died leaves a gap, one that has ended because of an error leaves its message. Waiting for
others is then bounded by their silence, not by the time that they need.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

__all__ = ["Heartbeat", "Store"]

_BEAT = 1.0


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key's value."""

    def get(self, key: str, /) -> bytes:
        """Return a key's value, as soon as there is one."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""


class Heartbeat:
    """Beats from a thread of its own, and looks whether the others do.

    Args:
        store: Shared by all processes, and used by nobody else.
        rank: Number of this process.
        world_size: Number of processes.
        limit: Seconds of silence after which a process is given up.
    """

    def __init__(self, store: Store, rank: int, world_size: int, limit: float) -> None:
        self.store, self.rank, self.limit = store, rank, limit
        self.others = [other for other in range(world_size) if other != rank]
        self._world_size, self._meetings = world_size, 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        self._who = f"{socket.gethostname()} {os.getpid()}"
        self._beat(0)
        threading.Thread(target=self._run, name="torchbayes-heartbeat", daemon=True).start()

    def _beat(self, count: int) -> None:
        self.store.set(f"alive/{self.rank}", f"{self._who} {count}")

    def _run(self) -> None:
        count = 0
        while not self._ended.wait(_BEAT):
            count += 1
            try:
                self._beat(count)
            except RuntimeError:  # the store has gone with the process that kept it
                return

    def end(self, error: BaseException | None = None) -> None:
        """Stop beating; tell the others why, if it is because of an error."""
        self._ended.set()
        if error is not None:
            lines = str(error).splitlines()
            with contextlib.suppress(RuntimeError):
                self.store.set(f"left/{self.rank}", lines[0] if lines else type(error).__name__)

    def lost(self) -> str | None:
        """Say which process has ended or is silent for longer than the limit, or return None."""
        longest = self.longest_silence()
        for other in self.others:
            if self.store.check([f"left/{other}"]):
                why = self.store.get(f"left/{other}").decode(errors="replace")
                return f"process {other} has ended: {why}"
            if self._dead(other):
                return f"process {other} has died"
        if longest is not None and longest[1] > self.limit:
            return f"process {longest[0]} has not answered for {longest[1]:.0f} s"
        return None

    def longest_silence(self) -> tuple[int, float] | None:
        """Return the process that has been silent longest while this one looked, and for how many seconds."""
        now, silences = time.monotonic(), []
        for other in self.others:
            key = f"alive/{other}"
            value = self.store.get(key) if self.store.check([key]) else b""
            if other not in self._seen or self._seen[other][0] != value:
                self._seen[other] = value, now
            silences.append((now - self._seen[other][1], other))
        if not silences:
            return None
        seconds, other = max(silences)
        return other, seconds

    def _dead(self, other: int) -> bool:
        """Whether a process of this machine does not exist any more."""
        parts = self._seen[other][0].decode(errors="replace").split()
        if len(parts) != 3 or parts[0] != socket.gethostname() or not parts[1].isdecimal():
            return False
        try:
            os.kill(int(parts[1]), 0)
            status = Path(f"/proc/{parts[1]}/stat").read_text().rpartition(")")[2].split()
        except ProcessLookupError:
            return True
        except OSError:  # another user's, or a system without /proc
            return False
        return status[:1] == ["Z"]

    def meet(self) -> None:
        """Wait for all processes, however long they need, as long as they live.

        Raises:
            ConnectionError: If one has ended or is silent.
        """
        self._meetings += 1
        done = f"met/{self._meetings}"
        if self.store.add(f"arrived/{self._meetings}", 1) == self._world_size:
            self.store.set(done, "1")
            return
        pause, looked = 5e-4, time.monotonic()
        while not self.store.check([done]):  # store.wait would print a line at every look
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if time.monotonic() - looked > _BEAT:
                why, looked = self.lost(), time.monotonic()
                if why is not None and not self.store.check([done]):
                    raise ConnectionError(why)
