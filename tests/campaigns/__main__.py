"""`make campaign MINUTES=60`: look for faults as long as there is time, and write down what was found.

Two processes work side by side: one kills, the other damages files, lets writes and processes fail, and
watches memory and threads. What they find is added to results/campaign.json every few seconds, with the
commit and the seed, so that nothing is lost and several runs add up; docs/reliability.md shows the sums.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import table

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("kills", "others")


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (
        " with changes"
        if git("status", "--porcelain", "--untracked-files=no", "src", "tests")
        else ""
    )


def _gather(files: list[Path]) -> dict[str, dict[str, dict[str, int]]]:
    tables: dict[str, dict[str, dict[str, int]]] = {}
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else []:
            if not line.endswith("]"):
                continue  # being written
            part, row, verdict = json.loads(line)
            counts = tables.setdefault(part, {}).setdefault(row, {})
            counts[verdict] = counts.get(verdict, 0) + 1
    return tables


def main() -> None:
    """Run the campaigns, or only write the table anew."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=None, help="the time if not given; always printed"
    )
    parser.add_argument(
        "--record", action="store_true", help="add to results/campaign.json and the page"
    )
    parser.add_argument("--table", action="store_true", help="only write the page's table anew")
    arguments = parser.parse_args()
    record = ROOT / "results" / "campaign.json"
    if arguments.table:
        table.write_page(table.read(record))
        return
    seed = int(time.time()) % 1_000_000 if arguments.seed is None else arguments.seed
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
    run: dict[str, Any] = {
        "commit": _commit(), "seed": seed, "began": began, "python": platform.python_version(),
    }  # fmt: skip
    print(
        f"campaign: seed {seed}, {arguments.minutes:g} minutes, commit {run['commit']}", flush=True
    )
    earlier = table.read(record) if arguments.record else []
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        files = [Path(name) / f"{part}.jsonl" for part in PARTS]
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.campaigns.work", part, str(file), str(seed),
                 str(60 * arguments.minutes)], cwd=ROOT,
            )
            for part, file in zip(PARTS, files, strict=True)
        ]  # fmt: skip
        try:
            while any(worker.poll() is None for worker in workers):
                time.sleep(min(10.0, max(0.5, arguments.minutes)))
                run["minutes"] = round((time.monotonic() - start) / 60, 1)
                run["tables"] = _gather(files)
                if arguments.record:
                    table.save(record, [*earlier, run])
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.terminate()
                worker.wait()
        run["tables"] = _gather(files)
    print(table.text([run]))
    failed = [worker.returncode for worker in workers if worker.returncode]
    if arguments.record:
        table.save(record, [*earlier, run])
        table.write_page([*earlier, run])
    bad = table.bad([run])
    print(*bad, sep="\n")
    if failed:
        print(f"a part of the campaign ended with code {failed}")
    sys.exit(bool(bad or failed))


if __name__ == "__main__":
    main()
