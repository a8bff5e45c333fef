"""A web server on this machine that can misbehave, and writers of small data files."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from torchbayes.data import download
from torchbayes.data.source import RemoteFile


@dataclass
class Server:
    """What the server gives, how it fails, and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    break_after: dict[str, list[int]] = field(default_factory=dict)
    ranges: bool = True
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def remote(self, name: str, content: bytes, *, mirrors: tuple[str, ...] = ("",)) -> RemoteFile:
        checksum = hashlib.sha256(content).hexdigest()
        return RemoteFile(name, checksum, tuple(f"{self.url}/{m}{name}" for m in mirrors))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            wanted = self.headers.get("Range")
            state.requests.append((name, wanted))
            if name not in state.files:
                self.send_error(404)
                return
            content, start = state.files[name], 0
            if wanted is not None and state.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                end = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self.send_header("Content-Range", end)
            else:
                self.send_response(200)
            body = content[start:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if state.break_after.get(name):
                body = body[: state.break_after[name].pop(0)]
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        state.url = f"http://127.0.0.1:{httpd.server_address[1]}"
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(download, "_pause", lambda seconds: None)
        yield state
        httpd.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no folder named by the environment."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("torchbayes.data.source.cache_folder", lambda: folder)
    monkeypatch.delenv("TORCHBAYES_DATA", raising=False)
    return folder


@pytest.fixture
def idx_bytes() -> Callable[[np.ndarray], bytes]:
    def write(array: np.ndarray) -> bytes:
        header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        return header + array.astype(np.uint8).tobytes()

    return write


@pytest.fixture
def mnist_files(idx_bytes: Callable[[np.ndarray], bytes]) -> dict[str, bytes]:
    """The four gzipped files, with 30 and 20 random images."""
    rng = np.random.default_rng(0)
    files = {}
    for prefix, count in (("train", 30), ("t10k", 20)):
        images, labels = rng.integers(0, 256, (count, 28, 28)), np.arange(count) % 10
        files[f"{prefix}-images-idx3-ubyte.gz"] = gzip.compress(idx_bytes(images))
        files[f"{prefix}-labels-idx1-ubyte.gz"] = gzip.compress(idx_bytes(labels))
    return files


@pytest.fixture
def cifar_files() -> dict[str, bytes]:
    """The six binary files, with 4 random images each."""
    rng = np.random.default_rng(1)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    files = {}
    for name in names:
        records = rng.integers(0, 256, (4, 3073)).astype(np.uint8)
        records[:, 0] %= 10
        files[name] = records.tobytes()
    return files


@pytest.fixture
def cifar_archive(cifar_files: dict[str, bytes]) -> bytes:
    """The tar archive of them, with members that must never reach the disk."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in cifar_files.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for evil in ("../escaped.txt", "cifar-10-batches-bin/readme.html"):
            info = tarfile.TarInfo(evil)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
    return buffer.getvalue()


@pytest.fixture
def svhn_files() -> dict[str, bytes]:
    """The two MATLAB files, with 12 and 11 random images and the labels 1 to 10."""
    rng = np.random.default_rng(2)
    files = {}
    for name, count in (("train_32x32.mat", 12), ("test_32x32.mat", 11)):
        buffer = io.BytesIO()
        images = rng.integers(0, 256, (32, 32, 3, count)).astype(np.uint8)
        labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
        scipy.io.savemat(buffer, {"X": images, "y": labels}, do_compression=True)
        files[name] = buffer.getvalue()
    return files


@pytest.fixture
def put() -> Callable[[Path, dict[str, bytes]], None]:
    def write(folder: Path, files: dict[str, bytes]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)

    return write
