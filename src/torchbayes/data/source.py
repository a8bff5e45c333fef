"""Sources of a published data set's files: a folder named by the user, the cache, the network."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

__all__ = ["DataError", "RemoteFile", "Source", "cache_folder", "find", "obtain"]

ENVIRONMENT = "TORCHBAYES_DATA"


class DataError(ValueError):
    """A data file is missing, truncated, damaged or inconsistent with its format.

    The message is one sentence that names the file or folder and says what to do.
    """


def damaged(path: Path, error: Exception) -> DataError:
    """Return the error for a file whose parser failed with `error`."""
    reason = str(error).split("\n")[0].strip("'\"").rstrip(".")
    return DataError(f"{path} is damaged or half-downloaded ({reason}): remove it and get it again")


@dataclass(frozen=True)
class RemoteFile:
    """A file to download.

    Args:
        name: Name in the cache folder.
        sha256: Published checksum.
        mirrors: Full addresses, tried in order.
    """

    name: str
    sha256: str
    mirrors: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The files of a published data set.

    Args:
        name: Name of the data set.
        folders: Subfolders that may hold the files; the first is the cache's.
        files: Possible names of each file.
        remote: Files to download.
        members: Files in the download, if it is a tar archive.
    """

    name: str
    folders: tuple[str, ...]
    files: tuple[tuple[str, ...], ...]
    remote: tuple[RemoteFile, ...]
    members: tuple[str, ...] = ()


def cache_folder() -> Path:
    """Return the folder for downloads, in the system's cache location."""
    import pooch

    return Path(pooch.os_cache("torchbayes"))


def find(source: Source, data_dir: str | Path | None = None) -> Path | None:
    """Find a data set's files on this machine.

    The folder named by `data_dir`, or else by the environment variable TORCHBAYES_DATA, is searched
    before the cache of earlier downloads.

    Returns:
        The folder with all the files (or their tar archive), or None.

    Raises:
        DataError: If the named folder does not exist, or has some of the files but not all: mixing
            them with downloaded ones could put test images into the training split.
    """
    named = _named(data_dir)
    if named is not None:
        if not named.is_dir():
            raise DataError(
                f"the data folder {named} does not exist: correct data_dir or {ENVIRONMENT}"
            )
        candidates = [named / folder for folder in source.folders]
        # The named folder may be the data set's own. Only its name tells: MNIST and Fashion-MNIST
        # have files of the same names.
        if named.resolve().name in source.folders:
            candidates.append(named)
        incomplete: tuple[Path, list[str]] | None = None
        for folder in candidates:
            missing = _missing(folder, source)
            if not missing:
                return folder
            if len(missing) < len(source.files):
                incomplete = folder, missing
        if source.members and (named / source.remote[0].name).is_file():
            return named / source.remote[0].name
        if incomplete is not None:
            raise DataError(
                f"{incomplete[0]} has only a part of {source.name!r} (missing: "
                f"{', '.join(incomplete[1])}): add the missing files or remove the others"
            )
    cached = cache_folder() / source.folders[0]
    return cached if not _missing(cached, source) else None


def obtain(source: Source, data_dir: str | Path | None, download: bool) -> Path:
    """Return the folder (or tar archive) with a data set's files, downloading them if needed.

    Raises:
        DataError: If the files are missing and cannot or may not be downloaded.
    """
    found = find(source, data_dir)
    if found is not None:
        return found
    named = _named(data_dir)
    wanted = ", ".join(names[0] for names in source.files)
    place = Path("DIR" if named is None else named) / source.folders[0]
    help_ = (
        f"put {wanted} into {place}"
        + (f" and set data_dir or {ENVIRONMENT} to DIR" if named is None else "")
        + ", or "
    )
    if not download:
        raise DataError(
            f"data set {source.name!r} is not on this machine: {help_}allow the download"
        )
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # The processes of one torchrun all arrive here at once; one downloads, the others wait.
        with FileLock(cache / f".{source.name}.lock"):
            folder = cache / source.folders[0]
            if _missing(folder, source):
                _download(source, folder)
            return folder
    except DataError as error:
        raise DataError(
            f"data set {source.name!r} is not on this machine and {error}: {help_}connect this "
            "machine to the network"
        ) from error
    except OSError as error:
        raise DataError(
            f"the cache folder {cache} could not be used ({error.strerror}): {help_}set "
            "XDG_CACHE_HOME to a writable folder"
        ) from error


def _download(source: Source, folder: Path) -> None:
    # Late: it imports HTTP and progress bars, and most runs have their data already.
    from torchbayes.data.download import fetch, unpack

    if not source.members:
        for file in source.remote:
            fetch(file, folder)
        return
    archive = fetch(source.remote[0], folder.parent)
    unpack(archive, source.members, folder)
    archive.unlink()


def _named(data_dir: str | Path | None) -> Path | None:
    folder = os.environ.get(ENVIRONMENT) if data_dir is None else data_dir
    return Path(folder).expanduser() if folder else None


def _missing(folder: Path, source: Source) -> list[str]:
    return [names[0] for names in source.files if not any((folder / n).is_file() for n in names)]
