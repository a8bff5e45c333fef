"""Data frames as inputs of a run on a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest

import torchbayes as tb
from torchbayes.data.table_file import frame_table, read_text_table
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.training import train_experiment


def frame() -> pandas.DataFrame:
    generator = np.random.default_rng(0)
    size = generator.uniform(20, 200, 120)
    town = generator.choice(["A", "B é", "C"], 120)
    price = 1000 * size + 20_000 * (town == "A") + 5000 * generator.standard_normal(120)
    size[::9] = np.nan
    return pandas.DataFrame({"size": size, "town": town, "price": price})


def test_a_frame_is_the_table_that_its_file_would_be(tmp_path: Path) -> None:
    own = pandas.DataFrame(
        {
            "a": [1.5, None, 1e-20],
            "b": ["x ", None, 'é,"y"'],
            "c": [1, 2, 3],
            "d": [True, False, True],
        }
    )
    own.to_csv(tmp_path / "f.csv", index=False)
    read, made = read_text_table(tmp_path / "f.csv"), frame_table(own)
    assert made.names == read.names
    assert made.rows == read.rows


def test_a_run_on_a_table_predicts_frames_by_their_columns_names(tmp_path: Path) -> None:
    table = frame()
    table.to_csv(tmp_path / "t.csv", index=False)
    experiment = Experiment(data=f"table:{tmp_path / 't.csv'}", epochs=20, options={"lr": 0.01})
    data = experiment.load_data(None)
    train_experiment(experiment, tmp_path / "run", data=data, progress=False)
    run = tb.load_run(tmp_path / "run")
    expected = run.predict(tmp_path / "t.csv").mean
    for inputs in (table, table[["town", "size"]], table.astype({"town": "category"})):
        np.testing.assert_array_equal(run.predict(inputs).mean, expected)
    errors = expected[:, 0].numpy() - table["price"].to_numpy()
    assert np.abs(errors).mean() < table["price"].std()
    with pytest.raises(tb.data.DataError, match="the data frame lacks the column 'town'"):
        run.predict(table[["size"]])
    with pytest.warns(UserWarning, match="columns that were not used: 'z'"):
        run.predict(table.assign(z=1))
    with pytest.warns(UserWarning, match="has levels that the training rows do not have"):
        run.predict(table.assign(town="elsewhere"))
