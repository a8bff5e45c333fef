"""The command line in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchbayes.cli import main


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call the command line in this process; gives the exit code, stdout and stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["torchbayes", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        output = capsys.readouterr()
        return int(stopped.value.code or 0), output.out, output.err

    return call
