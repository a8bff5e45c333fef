"""Where a published data set's files are: a folder the user names, the cache, or the network."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

__all__ = ["DataError", "RemoteFile", "Source", "cache_folder", "find", "obtain"]

ENVIRONMENT = "TORCHBAYES_DATA"


class DataError(ValueError):
    """A data file is missing, cut short, damaged, or does not say what its format promises.

    The message is one sentence that names the file or folder and says what to do.
    """


@dataclass(frozen=True)
class RemoteFile:
    """A file to download.

    Args:
        name: Its name in the cache folder.
        sha256: Published checksum.
        mirrors: Full addresses, tried in turn.
    """

    name: str
    sha256: str
    mirrors: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The files of a published data set.

    Args:
        name: The data set's name.
        folders: Subfolders that may hold the files, the cache's own first.
        files: For each file the names it may have.
        remote: What to download.
        members: Where the download is a tar archive, the files in it.
    """

    name: str
    folders: tuple[str, ...]
    files: tuple[tuple[str, ...], ...]
    remote: tuple[RemoteFile, ...]
    members: tuple[str, ...] = ()


def cache_folder() -> Path:
    """Give the folder that downloads go to: the system's place for caches."""
    import pooch

    return Path(pooch.os_cache("torchbayes"))


def find(source: Source, data_dir: str | Path | None = None) -> Path | None:
    """Look for a data set's files on this machine.

    The folder that `data_dir`, or else the environment variable TORCHBAYES_DATA, names is searched
    before the cache of earlier downloads.

    Returns:
        The folder that has all the files (or the tar archive of them), or None.

    Raises:
        DataError: If the named folder does not exist, or has some of the files but not all: mixing
            them with downloaded ones could put test images into the training split.
    """
    named = _named(data_dir)
    if named is not None:
        if not named.is_dir():
            raise DataError(
                f"The data folder {named} does not exist: correct data_dir or {ENVIRONMENT}."
            )
        incomplete: tuple[Path, list[str]] | None = None
        for folder in _candidates(named, source):
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
                f"{', '.join(incomplete[1])}): add the missing files or remove the others."
            )
    cached = cache_folder() / source.folders[0]
    return cached if not _missing(cached, source) else None


def obtain(source: Source, data_dir: str | Path | None, download: bool) -> Path:
    """Give the folder (or tar archive) with a data set's files, downloading them if need be.

    Raises:
        DataError: If the files are not here and cannot be downloaded, or may not be.
    """
    found = find(source, data_dir)
    if found is not None:
        return found
    named = _named(data_dir)
    wanted = ", ".join(names[0] for names in source.files)
    place = Path("DIR" if named is None else named) / source.folders[0]
    help_ = (
        f"put {wanted} into {place}"
        + (f" and name DIR by data_dir or {ENVIRONMENT}" if named is None else "")
        + ", or "
    )
    if not download:
        raise DataError(
            f"Data set {source.name!r} is not on this machine: {help_}allow the download."
        )
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # The processes of one torchrun all come here at once; one downloads, the others wait.
        with FileLock(cache / f".{source.name}.lock"):
            folder = cache / source.folders[0]
            if _missing(folder, source):
                _download(source, folder)
            return folder
    except DataError as error:
        reason = str(error).rstrip(".")
        raise DataError(
            f"Data set {source.name!r} is not on this machine and {reason}: {help_}connect this "
            "machine to the network."
        ) from error
    except OSError as error:
        raise DataError(
            f"The cache folder {cache} could not be used ({error.strerror}): {help_}set "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from error


def _download(source: Source, folder: Path) -> None:
    # Late: it brings HTTP and progress bars along, and most runs have their data already.
    from torchbayes.data.download import fetch, unpack

    if not source.members:
        for file in source.remote:
            fetch(file, folder)
        return
    archive = fetch(source.remote[0], folder.parent)
    unpack(archive, source.members, folder)
    archive.unlink()


def _named(data_dir: str | Path | None) -> Path | None:
    if data_dir is None:
        data_dir = os.environ.get(ENVIRONMENT)
    return None if data_dir is None or data_dir == "" else Path(data_dir).expanduser()


def _candidates(named: Path, source: Source) -> list[Path]:
    folders = [named / folder for folder in source.folders]
    # The folder may also be the data set's own. Only its name tells: MNIST and Fashion-MNIST have
    # files of the same names.
    if named.resolve().name in source.folders:
        folders.append(named)
    return folders


def _missing(folder: Path, source: Source) -> list[str]:
    return [names[0] for names in source.files if not any((folder / n).is_file() for n in names)]
