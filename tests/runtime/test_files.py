"""Real databases and record files under the runtime: read without a trace, and never a reason to fail."""

import hashlib
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import platformdirs
import pytest
from eager_family import FAMILY

from tilewright.db import shipped
from tilewright.db.paths import default_database
from tilewright.db.reader import Reader
from tilewright.db.records_json import write_records
from tilewright.db.rows import RecordRow, RunRow, Verdict
from tilewright.db.store import Store
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import WorkloadCase, load_problem
from tilewright.runtime import Grade, dispatch, forget, layers, lookup
from tilewright.runtime.layers import Layer
from tilewright.runtime.machine import machine_of

SMOKE = load_problem().with_constants(**load_problem().smoke_constants)
PLAN = FusionPlan((Stage("whole", {}),))
ROOT = Path(__file__).resolve().parents[2]


def a_case(seq_len: int = 16) -> WorkloadCase:
    return SMOKE.case(batch_size=1, seq_len=seq_len)


def tuned(path: Path, case: WorkloadCase | None = None) -> Path:
    """A database with the interpreter's record of one case."""
    case = case or a_case()
    environment = machine_of("interpret").environment
    source_hash = FAMILY.registry.source_hash(PLAN)
    record = RecordRow(
        case.key,
        PLAN.to_json(),
        PLAN.digest,
        source_hash,
        Verdict.UNMEASURED,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    with Store.open(path) as store:
        run = store.begin_run(RunRow("tune", 0, "quick", "0.1.0", "1"), environment)
        store.activate(run, case, environment, record)
    return path


def listing(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    def matching(text: str) -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        return [message for message in found if text in message]

    return matching


def test_a_tuned_database_serves(tmp_path: Path) -> None:
    found = lookup(a_case(), "interpret", db=tuned(tmp_path / "t.sqlite"))
    assert (found.grade, found.layer, found.plan) == (Grade.EXACT, Layer.EXPLICIT, PLAN)


def test_the_default_path_is_the_one_that_tune_writes() -> None:
    assert layers.user_database() == default_database()
    tuned(default_database())
    assert lookup(a_case(), "interpret").layer is Layer.USER


def test_record_files_serve_as_shipped_and_as_explicit(tmp_path: Path) -> None:
    with Reader.open(tuned(tmp_path / "t.sqlite")) as reader:
        records = reader.active_records()
    write_records(layers.SHIPPED_DIR / "one.json", records)
    write_records(tmp_path / "other.json", records)
    assert lookup(a_case(), "interpret").layer is Layer.SHIPPED
    assert lookup(a_case(), "interpret", db=tmp_path / "other.json").layer is Layer.EXPLICIT


def test_the_package_ships_its_folder_of_records() -> None:
    assert shipped.SHIPPED_DIR == ROOT / "runtime" / "records"
    assert shipped.SHIPPED_DIR.is_dir()


def test_a_lookup_leaves_a_read_only_database_and_its_folder_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    path = tuned(folder / "t.sqlite")
    before = listing(folder)
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        assert lookup(a_case(), "interpret", db=path).grade is Grade.EXACT
    finally:
        folder.chmod(0o755)
    assert listing(folder) == before


def cut_plan(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE records SET plan = substr(plan, 1, length(plan) / 2)")
    connection.close()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1024])


def fill_with_noise(path: Path) -> None:
    path.write_bytes(b"\x00noise" * 500)


def raise_schema(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'tw9999'")
    connection.close()


def drop_column(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE environments DROP COLUMN ptxas")
    connection.close()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [cut_plan, truncate, fill_with_noise, raise_schema, drop_column, replace_by_folder, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_broken_database_means_the_default_one_warning_and_an_untouched_file(
    tmp_path: Path, damage: Callable[[Path], None], warnings_of: Callable[[str], list[str]]
) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    path = tuned(folder / "t.sqlite")
    damage(path)
    before = listing(folder)
    for seq_len in (16, 16, 17):
        assert lookup(a_case(seq_len), "interpret", db=path).grade is Grade.DEFAULT
    assert len(warnings_of("t.sqlite")) == 1
    assert listing(folder) == before


def test_dispatch_survives_a_broken_user_database(warnings_of: Callable[[str], list[str]]) -> None:
    from tilewright.kernel_templates.inputs import make_inputs

    truncate(tuned(default_database()))
    assert dispatch(**make_inputs(a_case(), "cpu")).shape == (1, 16, 128)  # type: ignore[arg-type]
    assert len(warnings_of("tilewright.sqlite")) == 1


def test_a_broken_layer_does_not_hide_the_next(tmp_path: Path) -> None:
    tuned(default_database())
    fill_with_noise(tmp_path / "noise.sqlite")
    assert lookup(a_case(), "interpret", db=tmp_path / "noise.sqlite").layer is Layer.USER


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 99, "records": []}', '{"schema": 1, "records": [{}]}'])
def test_a_broken_record_file_is_one_warning(
    tmp_path: Path, text: str, warnings_of: Callable[[str], list[str]]
) -> None:
    layers.SHIPPED_DIR.mkdir()
    (layers.SHIPPED_DIR / "bad.json").write_text(text)
    for seq_len in (16, 17):
        assert lookup(a_case(seq_len), "interpret").grade is Grade.DEFAULT
    assert len(warnings_of("bad.json")) == 1


def test_a_broken_record_file_does_not_hide_the_others(tmp_path: Path) -> None:
    with Reader.open(tuned(tmp_path / "t.sqlite")) as reader:
        write_records(layers.SHIPPED_DIR / "good.json", reader.active_records())
    (layers.SHIPPED_DIR / "bad.json").write_text("{")
    assert lookup(a_case(), "interpret").layer is Layer.SHIPPED


def test_an_untuned_machine_warns_of_no_missing_database(warnings_of: Callable[[str], list[str]]) -> None:
    lookup(a_case(), "interpret")
    assert warnings_of("database") == []
    assert not Path(platformdirs.user_data_dir("tilewright")).exists()


def test_an_edited_environment_is_detected(tmp_path: Path) -> None:
    path = tuned(tmp_path / "t.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE environments SET triton = '3.1.0'")
    connection.close()
    found = lookup(a_case(), "interpret", db=path)
    assert (found.grade, [p.grade for p in found.passed_over]) == (Grade.DEFAULT, [Grade.STALE])
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE environments SET triton = ?, torch = '2.0.0'", (machine_of("interpret").environment.triton,)
        )
    connection.close()
    forget()
    assert lookup(a_case(), "interpret", db=path).grade is Grade.COMPATIBLE


WITHOUT = """
import sys
for name in ("sqlalchemy", "alembic", "optuna"):
    sys.modules[name] = None
sys.path[:0] = [{source!r}, {tests!r}]
from tilewright.kernel_templates import families
families.FAMILIES["gqa_attention"] = "eager_family"
from pathlib import Path
from tilewright.problem import load_problem
from tilewright.runtime import dispatch, lookup
problem = load_problem()
case = problem.with_constants(**problem.smoke_constants).case(batch_size=1, seq_len=16)
print(lookup(case, "interpret", db={records!r}).grade)
"""


def without_databases(script: str, data: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_DATA_HOME": str(data)}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)


def test_json_records_serve_without_sqlalchemy_and_optuna(tmp_path: Path) -> None:
    with Reader.open(tuned(tmp_path / "t.sqlite")) as reader:
        write_records(tmp_path / "records.json", reader.active_records())
    script = WITHOUT.format(
        source=str(ROOT / ".src"), tests=str(ROOT / "tests"), records=str(tmp_path / "records.json")
    )
    ended = without_databases(script, tmp_path / "data")
    assert (ended.stdout.strip(), ended.returncode) == ("exact", 0), ended.stderr


def test_importing_the_runtime_loads_no_torch() -> None:
    path = str(ROOT / ".src")
    script = f"import sys; sys.path.insert(0, {path!r}); import tilewright.runtime; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
