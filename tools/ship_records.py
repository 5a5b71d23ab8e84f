"""Makes the records that the package ships for a card out of the database that a tune left.

    python tools/ship_records.py DATABASE "NVIDIA H200"

Writes runtime/records/<gpu>.json, which the runtime serves from, and runtime/records/<gpu>.sqlite beside it: the same
records with the trials behind them, without superseded records and without the names of hosts.
"""

import shutil
import sqlite3
import sys
from pathlib import Path

from tilewright.db.reader import Reader
from tilewright.db.records_json import write_records

RECORDS = Path(__file__).resolve().parent.parent / "runtime" / "records"


def main(database: Path, gpu: str) -> None:
    stem = gpu.lower().replace(" ", "_")
    with Reader.open(database) as reader:
        records = reader.active_records(gpu=gpu)
    write_records(RECORDS / f"{stem}.json", sorted(records, key=lambda stored: (stored.problem, stored.case_name)))
    target = RECORDS / f"{stem}.sqlite"
    shutil.copyfile(database, target)
    with sqlite3.connect(target) as connection:
        connection.execute("delete from records where not active")
        connection.execute("update runs set host = '', pid = 0")
    connection.execute("pragma journal_mode = delete")
    connection.execute("vacuum")
    connection.close()
    print(f"{len(records)} records in {stem}.json and {stem}.sqlite ({target.stat().st_size // 1024} KiB)")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
