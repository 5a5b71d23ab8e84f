"""One command tunes, the next ones show and serve: the whole pipeline in the interpreter, as a person would use it."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DISPATCH = """
import json, sys, torch
from tilewright.problem import load_problem
from tilewright.kernel_templates.inputs import make_inputs
from tilewright.runtime import dispatch, lookup
problem = load_problem(sys.argv[1]).at_suite("smoke")
case = problem.parse_case(sys.argv[2])
inputs = make_inputs(case, "cpu")
extra = {} if "q_norm_weight" in inputs else {"head_dim": case["head_dim"]}
found = dispatch(**inputs, **extra)
namespace = {}
exec(problem.reference.replace("dim = 128", f"dim = {case['head_dim']}"), namespace)
expected = namespace["run"](**inputs).float()
error = ((found.float() - expected).norm() / expected.norm()).item()
print(json.dumps({"error": error, "grade": lookup(case).grade.value}))
"""


def command(*arguments: str, database: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / ".src"),
        "TILEWRIGHT_DB": str(database),
        "TRITON_INTERPRET": "1",
    }
    answer = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=500,
        check=False,
    )
    assert answer.returncode == code, answer.stderr[-2000:]
    return answer


def tilewright(*arguments: str, database: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    return command("-m", "tilewright.cli", *arguments, database=database, code=code)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("problem", ["gqa_attention_with_qk_norm", "glm_4_5_air_attention", "qwen3_attention"])
def test_tuned_once_then_shown_and_served(problem: str, tmp_path: Path) -> None:
    database = tmp_path / "tuned.sqlite"
    case = ("--problem", problem, "--case", "b2s7")
    tune = ("tune", *case, "--device", "interpret", "--effort", "quick", "--json")
    first = json.loads(tilewright(*tune, "--trials", "5", database=database).stdout)
    [tuned] = first["cases"]
    assert sum(tuned["trials"].values()) == 5
    assert tuned["record"]["verdict"] == "unmeasured"
    assert tuned["record"]["median_us"] is None

    again = json.loads(tilewright(*tune, "--trials", "3", database=database).stdout)
    assert again["cases"][0]["reused"] == 5

    shown = json.loads(tilewright("results", "--own", "--json", database=database).stdout)
    assert "b2s7" in json.dumps(shown)
    table = tilewright("results", "--own", database=database).stdout
    assert "us" not in table.split("b2s7")[1].split("\n")[0].split()

    served = json.loads(command("-c", DISPATCH, problem, "b2s7", database=database).stdout)
    assert served["grade"] in ("exact", "compatible")
    assert served["error"] < 0.02


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_tune_with_its_code_and_everything_stored(number: signal.Signals, tmp_path: Path) -> None:
    database = tmp_path / "cut.sqlite"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "TILEWRIGHT_DB": str(database)}
    tune = [sys.executable, "-m", "tilewright.cli", "tune", "--device", "interpret", "--effort", "full"]
    process = subprocess.Popen(tune, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert process.stderr is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _stored(database) < 3:
        time.sleep(0.2)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said
    assert _stored(database) >= 3
    with sqlite3.connect(database) as connection:
        assert connection.execute("select status from runs").fetchall() == [("interrupted",)]
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
    connection.close()


def _stored(database: Path) -> int:
    """Trials that are in the file by now."""
    if not database.exists():
        return 0
    connection = sqlite3.connect(database)
    try:
        return int(connection.execute("select count(*) from trials").fetchone()[0])
    except sqlite3.OperationalError:
        return 0
    finally:
        connection.close()


def test_dry_run_touches_nothing(tmp_path: Path) -> None:
    database = tmp_path / "none.sqlite"
    answer = tilewright("tune", "--device", "interpret", "--dry-run", "--json", database=database)
    content = json.loads(answer.stdout)
    assert len(content["cases"]) == 3
    assert all(case["plans"] for case in content["cases"])
    assert list(tmp_path.iterdir()) == []
