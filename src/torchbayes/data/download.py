"""Downloads that survive broken connections and never leave a bad file behind.

pooch decides what is needed, checks the published checksum and moves the file into place; this
module adds a downloader that resumes after a broken connection (HTTP range requests on a `.part`
file), several mirrors, and a progress bar.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import pooch
import requests
import urllib3
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from torchbayes.core.reading import check_inflation
from torchbayes.data.source import DataError, RemoteFile, damaged

__all__ = ["fetch", "read_members", "unpack"]

_TRIES = 3
_TIMEOUT = (10.0, 60.0)
_CHUNK = 1 << 16
_pause = time.sleep


def fetch(file: RemoteFile, folder: Path) -> Path:
    """Download a file into `folder` unless it is already there, and return its path.

    An interrupted download is resumed, whatever interrupted it. A file gets its name only after its
    checksum has been verified; one with the wrong checksum is removed.

    Raises:
        DataError: If no mirror delivers the file; the message gives each one's reason.
    """
    part = folder / f"{file.name}.part"
    reasons = []
    for url in file.mirrors:
        # A part left by an earlier run may itself be the cause of a wrong checksum: such a failure
        # is worth a second, fresh attempt at the same address.
        for fresh in (not part.exists(), True):
            try:
                downloader = _Downloader(part)
                with downloader.progress:
                    path = pooch.retrieve(
                        url, f"sha256:{file.sha256}", file.name, folder, downloader=downloader
                    )
                return Path(path)
            except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                reasons.append(f"{url}: {_reason(error)}")
                break
            except OSError as error:
                raise DataError(
                    f"{file.name} could not be written to {folder} ({error.strerror}): free some "
                    "space or make the folder writable"
                ) from error
            except ValueError:
                # How pooch reports a wrong checksum.
                if fresh:
                    reasons.append(f"{url}: its checksum is not the published one")
                    break
    raise DataError(f"{file.name} could not be downloaded ({'; '.join(reasons)})")


def unpack(archive: Path, members: tuple[str, ...], folder: Path) -> None:
    """Unpack the named files of a tar archive so that `folder` appears whole or not at all.

    Only the contents of these members are used, and they are written under their base names: no
    path, link or permission of the archive takes effect.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, content in read_members(archive, members).items():
            (temporary / name).write_bytes(content)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_members(archive: Path, members: tuple[str, ...]) -> dict[str, bytearray]:
    """Read the named files of a tar archive; return their contents by base name."""
    contents = {}
    try:
        with tarfile.open(archive) as tar:
            check_inflation(archive, sum(tar.getmember(member).size for member in members))
            for member in members:
                stream = tar.extractfile(member)
                if stream is None:
                    raise KeyError(member)
                contents[member.rpartition("/")[2]] = bytearray(stream.read())
    except (tarfile.TarError, OSError, EOFError, KeyError, zlib.error) as error:
        raise damaged(archive, error) from error
    return contents


class _Downloader:
    """A downloader for pooch that writes to a `.part` file and resumes an existing one."""

    def __init__(self, part: Path) -> None:
        self.part = part
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task(part.stem, total=None)

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        """Download `url`, in as many requests as it takes while they make progress."""
        began = furthest = self._have()
        idle = 0
        while True:
            try:
                self._request(url)
                break
            except requests.HTTPError:
                raise
            except (requests.RequestException, urllib3.exceptions.HTTPError):
                idle = 0 if self._have() > furthest else idle + 1
                furthest = max(furthest, self._have())
                # A mirror that has not sent a byte is down: try the next one at once.
                if furthest == began or idle >= _TRIES:
                    raise
                _pause(2.0**idle)
        os.replace(self.part, output_file)

    def _have(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _request(self, url: str) -> None:
        have = self._have()
        # Identity: the file as it is, not compressed again for transport.
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            begin, total = _content_range(response)
            if response.status_code == requests.codes.requested_range_not_satisfiable:
                if have != total:
                    self.part.unlink()
                    self._request(url)
                return
            response.raise_for_status()
            continued = response.status_code == requests.codes.partial_content and begin == have
            length = response.headers.get("Content-Length")
            offset = have if continued else 0
            expected = None if length is None else offset + int(length)
            self.progress.update(self.task, total=expected, completed=offset)
            with self.part.open("ab" if continued else "wb") as out:
                for chunk in response.raw.stream(_CHUNK, decode_content=False):
                    out.write(chunk)
                    self.progress.advance(self.task, len(chunk))
        # urllib3 detects this itself from version 2 on.
        if expected is not None and self._have() < expected:
            raise requests.ConnectionError(f"broke off after {self._have()} of {expected} bytes")


def _content_range(response: requests.Response) -> tuple[int | None, int | None]:
    """Parse `bytes BEGIN-END/TOTAL` or `bytes */TOTAL`; None stands for what is not given."""
    header = response.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(?:(\d+)|\*)", header.strip())
    begin, total = match.groups() if match else (None, None)
    return int(begin) if begin else None, int(total) if total else None


def _reason(error: Exception) -> str:
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"HTTP status {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "timed out"
    # requests wraps errors up to the first byte; a bare urllib3 error happened later.
    broken = isinstance(error, urllib3.exceptions.HTTPError) or "broke off" in str(error)
    return "the connection broke off" if broken else "no connection"
