"""Tables: what is read, how it is encoded (as scikit-learn does), and what is refused in one sentence."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import torchbayes as tb
from tests.tables import gal_folder
from torchbayes.core.storage import write_json
from torchbayes.data import DATASETS, DataError, DataSet, TableEncoding, load_data, ood_for
from torchbayes.data.table_file import read_text_table
from torchbayes.data.uci import load_uci

COLOURS = ("red", "green", "blue")


def rows(count: int = 60, seed: int = 0) -> list[list[Any]]:
    """Rows of a number, a level, a number and a target, some of the first three missing."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        size, colour, age = rng.normal(50, 9), COLOURS[rng.integers(3)], int(rng.integers(1, 90))
        price = 3 * size + 20 * COLOURS.index(colour) + rng.normal()
        result.append([f"{size:.3f}", colour, age, f"{price:.3f}"])
    for row, column, gap in ((3, 0, "NA"), (9, 0, ""), (11, 1, "?"), (12, 2, "nan"), (20, 1, "")):
        result[row][column] = gap
    return result


def write(path: Path, content: list[list[Any]], header: str = "size,colour,age,price") -> Path:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header.split(",")] * bool(header) + content)
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write(tmp_path / "things.csv", rows())


def load(path: Path, **options: Any) -> DataSet:
    return load_data(f"table:{path}", **options)


def numbers_of(data: DataSet, split: str) -> list[int]:
    assert data.table is not None
    found = getattr(data.table, split)
    assert found is not None
    return list(found)


def test_the_encoding_is_that_of_scikit_learn(table: Path) -> None:
    data = load(table, target="price", validation=0.2, seed=3)
    content = rows()
    train, test = numbers_of(data, "train"), numbers_of(data, "test")
    held = numbers_of(data, "validation")
    assert sorted(train + test + held) == list(range(60))
    number = {"NA": np.nan, "": np.nan, "nan": np.nan}
    level = {"?": None, "": None}
    cells = np.empty((60, 3), dtype=object)
    for i, (size, colour, age, _) in enumerate(content):
        cells[i] = (float(number.get(size, size)), level.get(colour, colour),
                    float(number.get(age, age)))  # fmt: skip

    def numbers(index: int) -> Any:
        return make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), [index]

    levels = make_pipeline(
        SimpleImputer(strategy="most_frequent", missing_values=None),
        OneHotEncoder(handle_unknown="ignore", sparse_output=False),
    )
    gaps = MissingIndicator(missing_values=np.nan, features="all")
    nothing = MissingIndicator(missing_values=None, features="all")
    parts = {
        "size": numbers(0), "size gone": (gaps, [0]), "colour": (levels, [1]),
        "colour gone": (nothing, [1]), "age": numbers(2), "age gone": (gaps, [2]),
    }  # fmt: skip
    truth = ColumnTransformer([(name, *part) for name, part in parts.items()])
    truth.fit(cells[train])
    missing = {name: any(cells[i, k] in (None,) or cells[i, k] != cells[i, k] for i in train)
               for k, name in enumerate(("size", "colour", "age"))}  # fmt: skip
    keep = [True, missing["size"], *[True] * 3, missing["colour"], True, missing["age"]]
    for split, index in ((data.train, train), (data.test, test), (data.validation, held)):
        assert isinstance(split, tb.data.Split)
        expected = truth.transform(cells[index])[:, keep].astype(float)
        np.testing.assert_allclose(split.inputs.numpy(), expected, rtol=1e-5, atol=1e-6)
    prices = np.array([float(row[3]) for row in content])
    scaler = StandardScaler().fit(prices[train][:, None])
    scaled = scaler.transform(prices[test][:, None])
    np.testing.assert_allclose(data.test.targets.numpy(), scaled, rtol=1e-5, atol=1e-6)
    assert data.encoding is not None
    assert data.encoding.std == pytest.approx(float(scaler.scale_[0]))
    assert data.shape == (len(data.encoding.inputs),) == (sum(keep),)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", " ", "   "])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_delimiters_and_line_ends(tmp_path: Path, delimiter: str, ending: str) -> None:
    lines = [["a", "b", "target"], *([f"{i}.5", f"{i % 4}", f"{i * 1.25}"] for i in range(20))]
    file = tmp_path / "t.txt"
    file.write_bytes(ending.join(delimiter.join(line) for line in lines).encode() + b"\n\n")
    read = read_text_table(file)
    assert (read.names, read.header, len(read.rows)) == (("a", "b", "target"), True, 20)
    assert read.rows[3] == ["3.5", "3", "3.75"]


def test_quotes_byte_order_mark_and_spaces(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    text = 'name, "a, b"\n"x ""y""", 1.5\n"two\nlines",2.5\n'
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    read = read_text_table(file)
    assert read.names == ("name", "a, b")
    assert read.rows == [['x "y"', "1.5"], ["two\nlines", "2.5"]]


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("a,b\n1,2\n3,4\n", True),
        ("1,2\n3,4\n", False),
        ("id,2019,2020\nx,1,2\ny,3,4\n", False),  # text above text: a row like the others
        ("id,2019,2020\n7,1,2\n8,3,4\n", True),  # text above numbers
        (",x\n0,1\n1,2\n", True),
        ("red,1\nblue,2\n", False),
        ("colour,shape\nred,round\n", True),
    ],
)
def test_a_header_is_recognised(tmp_path: Path, text: str, header: bool) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    assert read_text_table(file).header is header


def test_pandas_reads_the_same(table: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(table, na_values=["?"])
    read = read_text_table(table)
    assert list(frame.columns) == list(read.names)
    np.testing.assert_allclose(
        frame["size"], [float(r[0]) if r[0] not in ("NA", "") else np.nan for r in read.rows]
    )


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (["yes", "no"] * 10, "classification"),
        (["0", "1"] * 10, "classification"),
        (["0.0", "1.0"] * 10, "classification"),
        (["3", "4", "5", "6"] * 5, "classification"),
        ([str(i) for i in range(20)], "regression"),
        (["3.5", "4.0", "5.0", "6.5"] * 5, "regression"),
    ],
)
def test_the_task_is_found_from_the_target(tmp_path: Path, values: list[str], task: str) -> None:
    file = write(tmp_path / "t.csv", [[i, v] for i, v in enumerate(values)], "a,y")
    data = load(file)
    assert bool(data.classes) == (task == "classification")
    assert f"Task: {task} (the target " in data.note
    assert "Target: 'y' (the last column)" in data.note
    if values[0] == "0":
        assert load(file, task="regression").classes == ()


def test_classes_are_ordered_as_numbers_and_not_as_text(tmp_path: Path) -> None:
    content = [[i, 3 * (i % 4) + 1] for i in range(40)]
    data = load(write(tmp_path / "t.csv", content, "a,y"), task="classification")
    assert data.classes == ("1", "4", "7", "10")
    index = numbers_of(data, "train")
    assert data.train.targets.tolist() == [i % 4 for i in index]


def test_the_target_by_name_number_and_from_the_end(table: Path, tmp_path: Path) -> None:
    found = [load(table, target=t).encoding for t in ("age", 2, "2", -2, "-2")]
    assert {e.target for e in found if e is not None} == {"age"}
    bare = load(write(tmp_path / "bare.csv", rows(), ""), target="2", drop=[0])
    assert bare.encoding is not None
    assert (bare.encoding.target, bare.encoding.left_out) == ("2", {"0": "dropped"})


def test_a_random_split_is_seeded_and_keeps_the_shares_of_the_classes(tmp_path: Path) -> None:
    labels = ["a"] * 70 + ["b"] * 20 + ["c"] * 10
    file = write(tmp_path / "t.csv", [[i, y] for i, y in enumerate(labels)], "a,y")
    tests = []
    for split in (0, 0, 1):
        data = load(file, split=split, test_share=0.3)
        rows_ = numbers_of(data, "test")
        assert Counter(labels[i] for i in rows_) == {"a": 21, "b": 6, "c": 3}
        assert sorted(rows_ + numbers_of(data, "train")) == list(range(100))
        tests.append(rows_)
    assert tests[0] == tests[1] != tests[2]


def test_test_rows_from_a_file(table: Path, tmp_path: Path) -> None:
    file = tmp_path / "index_test_4.txt"
    file.write_text("7\n3.0e+00\n59\n")
    data = load(table, split=file)
    assert numbers_of(data, "test") == [3, 7, 59]
    colours = [row[1] for row in rows()]
    file.write_text("\n".join(str(i) for i, colour in enumerate(colours) if colour == "blue"))
    assert "No training rows of 'blue'." in load(table, target="colour", split=file).note
    file.write_text("7 60")
    with pytest.raises(DataError, match="has '60', expected row numbers from 0 to 59"):
        load(table, split=str(file))


def test_other_rows_in_the_file_of_test_rows_are_other_data(table: Path, tmp_path: Path) -> None:
    file = tmp_path / "test.txt"
    file.write_text("3 7 59")
    before = load(table, split=file).digest
    assert load(table, split=file).digest == before
    file.write_text("3 8 59")
    assert load(table, split=file).digest != before


def test_rows_without_a_target_are_counted_and_left_out(tmp_path: Path) -> None:
    content = rows()
    content[4][3] = content[8][3] = ""
    data = load(write(tmp_path / "t.csv", content))
    assert "2 rows without a target left out" in data.note
    assert len(data.train) + len(data.test) == 58
    assert not {4, 8} & {*numbers_of(data, "train"), *numbers_of(data, "test")}


def test_columns_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    content = [[i, 7, "", "same", i % 5, i * 1.5] for i in range(30)]
    data = load(write(tmp_path / "t.csv", content, ",seven,none,word,a,y"))
    assert data.encoding is not None
    assert data.encoding.inputs == ["a"]
    same = "the same in all training rows"
    expected = {"": "row numbers without a name", "seven": same, "none": "empty", "word": same}
    assert data.encoding.left_out == expected


def test_the_encoding_survives_its_file_and_is_used_instead_of_a_new_one(
    table: Path, tmp_path: Path
) -> None:
    data = load(table, validation=0.3)
    assert data.encoding is not None
    data.encoding.save(tmp_path / "table.json")
    kept = TableEncoding.load(tmp_path / "table.json")
    assert kept == data.encoding
    again = load(table, encoding=kept)  # without validation: other training rows
    index = numbers_of(again, "test")
    assert index == numbers_of(data, "test")
    torch.testing.assert_close(again.test.inputs, data.test.inputs, rtol=0, atol=0)
    assert again.encoding == kept != load(table).encoding
    table.write_text(table.read_text().replace("red", "Red"))
    with pytest.raises(DataError, match="is not the table that the run was trained on"):
        load(table, encoding=kept)


@pytest.mark.parametrize(
    ("change", "sealed", "match"),
    [
        (('"version": 1', '"version": 2'), True, "is of version 2, newer than this torchbayes"),
        (('"levels"', '"lvls"'), True, "is damaged"),
        (("torchbayes-table", "x"), True, "is damaged"),
        (('"mean": ', '"mean": 1'), False, "has been damaged .* with resume=True"),
        (('",\n  "crc32": "', ""), False, "is damaged"),
        (("{", "", 1), False, "cannot be read as JSON .* with resume=True"),
    ],
)
def test_a_damaged_encoding_is_refused(
    table: Path, tmp_path: Path, change: tuple[Any, ...], sealed: bool, match: str
) -> None:
    """Also one with a sound checksum, as another version or another program might write it."""
    file = tmp_path / "table.json"
    encoding = load(table).encoding
    assert encoding is not None
    encoding.save(file)
    text = file.read_text()
    changed = text.replace(*change)
    assert changed != text
    if sealed:
        write_json(file, {k: v for k, v in json.loads(changed).items() if k != "crc32"})
    else:
        file.write_text(changed)
    with pytest.raises(DataError, match=match):
        TableEncoding.load(file)


def test_other_rows_are_encoded_by_name_in_any_order(table: Path, tmp_path: Path) -> None:
    data = load(table)
    encoding = data.encoding
    assert encoding is not None
    new = write(tmp_path / "new.csv", [["", "51.5", "purple"]], "age,size,colour")
    inputs, notes = encoding.encode(read_text_table(new, header=True))
    found = dict(zip(encoding.inputs, inputs[0].tolist(), strict=True))
    age, size = (next(c for c in encoding.columns if c.name == n) for n in ("age", "size"))
    assert found["size"] == pytest.approx((51.5 - size.mean) / size.std)
    assert found["age"] == pytest.approx((age.median - age.mean) / age.std)
    assert [found[f"colour = {c}"] for c in COLOURS] == [0, 0, 0]
    assert notes == [
        "column 'colour' has levels that the training rows do not have ('purple'): they count as none of the "
        "known ones"
    ]
    with pytest.raises(
        DataError, match=r"lacks the columns 'size', 'age' .*; it has 'sise', which"
    ):
        encoding.encode(read_text_table(write(tmp_path / "n.csv", [["1", "red"]], "sise,colour")))
    with pytest.raises(DataError, match="has 'old' in column 'age', row 1, where numbers are"):
        encoding.encode(
            read_text_table(write(tmp_path / "o.csv", [["1", "red", "old"]], "size,colour,age"))
        )


def test_rows_of_a_table_without_names_are_encoded_by_position(tmp_path: Path) -> None:
    data = load(write(tmp_path / "bare.csv", rows(), ""), target=1, drop=["2"])
    encoding = data.encoding
    assert encoding is not None
    whole, _ = encoding.encode(read_text_table(tmp_path / "bare.csv"))
    short = write(tmp_path / "short.csv", [[r[0], *r[2:]] for r in rows()], "")
    inputs, _ = encoding.encode(read_text_table(short, header=False))
    assert torch.equal(whole, inputs)
    narrow = write(tmp_path / "narrow.csv", [[1, 2]] * 3, "")
    with pytest.raises(
        DataError, match="has 2 columns, expected the 4 of the training table, or 3"
    ):
        encoding.encode(read_text_table(narrow, header=False))


CONTENT = "".join(f"{i},{i * 1.5}\n" for i in range(20))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"a,y\n", "has column names but no rows"),
        (b"a,y\n1,2.5\n", "leaves 1 row to train on and 0 to test on"),
        (b"a\n1\n2\n", "has a single column"),
        (b"a,b,y\n1,2,3\n1,2\n", "has 2 fields in line 3 and 3 in its first row"),
        (b"a b y\n1 2 3\n1 2\n", "has 2 fields in line 3 and 3 in its first row"),
        (b"a,a,y\n1,2,3\n", "two columns named 'a'"),
        (b"a,,y\n" + b"5,2,3.5\n5,9,3\n" * 9, "no name for its column 1"),
        (b'a,y\n"x,1\n2,3\n', "a double quote that is not closed"),
        (b"a,y\n" + b"x" * 200_000 + b",1\n", "field larger than field limit"),
        ("stadt,y\nMünchen,1\n".encode("latin-1"), "not text in UTF-8 .byte 0xfc in line 2."),
        (b"a,y\n1\x00,2\n", "zero byte"),
        (f"a,y\n{CONTENT}inf,1.5\n".encode(), "has 'inf' in column 'a', row 21"),
        (f"a,y\n{CONTENT}1,-Infinity\n".encode(), "has '-Infinity' in column 'y', row 21"),
        (f"a,y\n{CONTENT}".replace(".5", ",5").encode(), "fields in line"),
        (
            f"a,y\n{CONTENT}".replace(",", ";").replace(".5", ",5").encode(),
            "with a comma in column 'y'.*choose another",
        ),
        (b"a,y\n" + b"3,1.5\n4,1.5\n" * 9, "has the same number, 1.5, in column 'y'"),
        (b"a,y\n" + b"3,yes\n4,yes\n" * 9, "has one class, 'yes'"),
        (b"a,y\n" + b"".join(b"3,p%d\n" % i for i in range(9)), "9 different values.*choose"),
        (b"a,y\n" + b"3,1.5\n3,2.5\n" * 9, "has no column to predict from"),
        (b"a,y\n" + b"3,\n4,\n" * 9, "has no values in its target"),
        (b"a,b,y\n" + b"1e308,3,1.5\n-1e308,4,2.5\n" * 9, "too large to standardise"),
    ],
)
def test_hostile_files_are_refused_in_one_sentence(
    tmp_path: Path, content: bytes, match: str
) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(content)
    with pytest.raises(DataError, match=match) as refused:
        load(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([f"person {i}" for i in range(30)], "30 different values .* too many .*drop=.'x"),
        ([f"2021-03-{i % 28 + 1:02d}" for i in range(30)], "has dates in column 'x"),
        ([f"{i % 12 + 1}/{i % 5 + 1}/2021 10:00" for i in range(30)], "has dates in column 'x"),
        ([*map(str, range(29)), "3o"], "too many for levels .'3o' is not a number."),
        ([f"{i},5" for i in range(30)], "has numbers with a comma in column 'x"),
    ],
)
def test_columns_that_cannot_be_levels_are_refused(
    tmp_path: Path, values: list[str], match: str
) -> None:
    """Their names come out without the terminal's escape sequences."""
    content = [[v, i % 3, i * 1.5] for i, v in enumerate(values)]
    file = write(tmp_path / "t.csv", content, "x\x1b[31m,b,y")
    with pytest.raises(DataError, match=match) as refused:
        load(file)
    assert "\x1b" not in str(refused.value)
    assert load(file, drop=["x\x1b[31m"]).shape == (1,)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"target": "prize"}, "no column 'prize' .the target.: it has 'size', 'colour'"),
        ({"target": -5}, "no column '-5'"),
        ({"drop": ["price"]}, "is the target and cannot be left out"),
        ({"task": "ranking"}, "task is 'ranking': expected classification or regression"),
        ({"target": "colour", "task": "regression"}, "the target of a regression"),
        ({"test_share": 1.5}, "test_share is 1.5"),
        ({"split": "no-file"}, "there is no file of row numbers no-file"),
        ({"split": "/dev/null"}, "/dev/null is a device, not a file"),
        ({"size": 8}, "size=8 is for folders of images"),
    ],
)
def test_bad_options_are_refused(table: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load(table, **options)


def test_a_device_is_no_table() -> None:
    # /dev/zero would be read until the memory is full.
    with pytest.raises(DataError, match="/dev/null is a device, not a file"):
        load_data("table:/dev/null")


def test_options_of_tables_are_for_tables(table: Path) -> None:
    with pytest.raises(ValueError, match="target=x is for tables and 'digits' is not one"):
        load_data("digits", target="x")
    with pytest.raises(ValueError, match="give table:"):
        load_data(str(table))
    with pytest.raises(DataError, match=r"there is no table nothing.csv"):
        load_data("table:nothing.csv")


def test_unfamiliar_rows_have_numbers_far_away_and_levels_that_exist(table: Path) -> None:
    data = load(table, target="price")
    far = ood_for(data)
    assert far.name == "far rows"
    assert data.encoding is not None
    names = data.encoding.inputs
    numbers = far.inputs[:, [names.index("size"), names.index("age")]]
    distance = numbers.square().mean(1).sqrt()
    assert 4 <= float(distance.min()) <= float(distance.max()) <= 6
    levels = far.inputs[:, [names.index(f"colour = {c}") for c in COLOURS]]
    assert torch.equal(levels.sum(1), torch.ones(len(levels)))
    assert ood_for(load(table, target="price", drop=["size", "age"])).name == "shuffled rows"


def test_a_network_can_be_fitted_to_it(table: Path) -> None:
    data = load(table, target="price")
    assert data.encoding is not None
    make = lambda: tb.models.mlp(data.shape[0], 1, hidden=(16,))  # noqa: E731
    run = tb.fit(make, data.train, "map", epochs=60, batch_size=16, lr=0.02, progress=False)
    p = run.predict(data.test.inputs, 1)
    own = p.rescaled(data.encoding.mean, data.encoding.std)
    prices = np.array([float(rows()[i][3]) for i in numbers_of(data, "test")])
    off = own.mean[:, 0].numpy() - prices
    assert np.sqrt(np.mean(off**2)) < 0.5 * prices.std()
    # The density of y = scale · z + shift is that of z divided by the scale.
    shifted = p.log_prob(data.test.targets) - np.log(data.encoding.std)
    np.testing.assert_allclose(own.log_prob(torch.from_numpy(prices)), shifted, rtol=1e-4)
    for q in (0.05, 0.5, 0.95):
        np.testing.assert_allclose(
            own.quantile(q),
            p.quantile(q).double() * data.encoding.std + data.encoding.mean,
            rtol=1e-4,
        )


def test_the_layout_of_gals_splits(tmp_path: Path) -> None:
    folder = gal_folder(tmp_path, 12)
    values = np.loadtxt(folder / "data.txt")
    for k in (0, 1):
        data = load_data("uci:yacht", split=k, data_dir=tmp_path)
        train = np.loadtxt(folder / f"index_train_{k}.txt").astype(int)
        test = np.loadtxt(folder / f"index_test_{k}.txt").astype(int)
        inputs, targets = values[:, [0, 2, 3]], values[:, 1:2]
        for split, index in ((data.train, train), (data.test, test)):
            scaled = StandardScaler().fit(inputs[train]).transform(inputs[index])
            np.testing.assert_allclose(split.inputs.numpy(), scaled, rtol=1e-4, atol=1e-6)
            scaled = StandardScaler().fit(targets[train]).transform(targets[index])
            np.testing.assert_allclose(split.targets.numpy(), scaled, rtol=1e-4, atol=1e-6)
    again = load_data("uci:yacht", split="seed", seed=1, data_dir=tmp_path / "uci")
    assert torch.equal(again.test.inputs, data.test.inputs)
    with pytest.raises(DataError, match=r"has no split 2: .* has 2 of them"):
        load_data("uci:yacht", split=2, data_dir=tmp_path)
    with pytest.raises(ValueError, match="target=1 is for tables of your own"):
        load_data("uci:yacht", target=1, data_dir=tmp_path)
    (folder / "index_test_0.txt").write_text((folder / "index_train_0.txt").read_text())
    with pytest.raises(DataError, match="rows in common"):
        load_data("uci:yacht", data_dir=tmp_path)


def test_missing_uci_files_say_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"put data.txt, .* into DIR/uci/bostonHousing and pass data_dir=DIR"
    ):
        load_uci("uci:boston", tmp_path)
    with pytest.raises(DataError, match=r"put airfoil.csv, .* into DIR/uci and pass data_dir=DIR"):
        load_uci("uci:airfoil", tmp_path)


@pytest.mark.parametrize(
    ("name", "size", "inputs"),
    [("boston", 506, 13), ("concrete", 1030, 8), ("energy", 768, 8), ("wine", 1599, 11),
     ("yacht", 308, 6), ("airfoil", 1503, 5)],
)  # fmt: skip
def test_real_uci_tables(name: str, size: int, inputs: int) -> None:
    if not DATASETS[f"uci:{name}"].available():
        pytest.skip(f"uci:{name} is not on this machine")
    data = load_data(f"uci:{name}", split=19)
    assert len(data.train) + len(data.test) == size
    assert data.shape == (inputs,)
    assert len(data.test) == pytest.approx(size / 10, abs=1)
    torch.testing.assert_close(data.train.inputs.mean(0), torch.zeros(inputs), rtol=0, atol=1e-5)
