"""Processes of the tuner end with it, whatever they are doing, and say nothing on its stdout."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tilewright.db.rows import Status
from tilewright.kernel_templates.device import INTERPRETER_LIMITS, named_limits
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import Stage
from tilewright.problem import load_problem
from tilewright.search.compile_pool import CompileLimit, PooledCompiler
from tilewright.search.outcome import MeasureOptions
from tilewright.search.session import DeviceSession

ROOT = Path(__file__).resolve().parents[2]
CASE = load_problem().at_suite("smoke").parse_case("b1s7")
BUSY = Stage("waits_for_a_process", {})
HEAD = """
import sys
from tilewright.kernel_templates.device import named_limits
from tilewright.kernel_templates.plan import Stage
from tilewright.problem import load_problem
from tilewright.search.compile_pool import PooledCompiler
from tilewright.search.outcome import MeasureOptions
from tilewright.search.session import DeviceSession
CASE = load_problem().at_suite("smoke").parse_case("b1s7")
BUSY = Stage("waits_for_a_process", {})
if __name__ == "__main__":
"""
INTERPRETS = """
    with DeviceSession("interpret") as session:
        stage = Stage("norm_rope", VALUES)
        print(session.evaluate(CASE, stage, MeasureOptions(), run_limit_s=60).status.value)
"""
COMPILES_ONE = """
    with PooledCompiler("gqa_attention", named_limits(90, 132), processes=1) as compiler:
        print(compiler.result(Stage("norm_rope", VALUES), CASE).status.value)
"""
EVALUATES = """
    with DeviceSession("interpret", hooks=("bad_candidates:install",)) as session:
        session.evaluate(CASE, BUSY, MeasureOptions(), run_limit_s=300, compile_limit_s=300)
"""
COMPILES = """
    hooks = ("bad_candidates:install_bad_compiler",)
    with PooledCompiler("gqa_attention", named_limits(90, 132), processes=1, hooks=hooks) as compiler:
        compiler.result(BUSY, CASE)
"""


class Short(CompileLimit):
    """Begins once the compiler is ready."""

    @property
    def limit_s(self) -> float:
        return 2.0


def a_pool(limit: CompileLimit | None = None) -> PooledCompiler:
    hooks = ("bad_candidates:install_bad_compiler",)
    return PooledCompiler("gqa_attention", named_limits(90, 132), processes=1, hooks=hooks, limit=limit)


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a busy process writes its own number and that of the process it waits for."""
    path = tmp_path / "pids"
    monkeypatch.setenv("BUSY_PIDS", str(path))
    return path


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    script = folder / "parent.py"
    script.write_text(HEAD + program)
    command = [sys.executable, str(script)]
    return subprocess.Popen(command, env=a_child_environment(), stderr=subprocess.DEVNULL, text=True)


def a_child_environment(**changes: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**plain, "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), str(ROOT / "tests")]), **changes}


def within(seconds: float, happens: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.05)
    return happens()


def written(path: Path) -> list[int]:
    assert within(60, lambda: path.exists() and path.read_text().endswith("\n")), "the process never got busy"
    return [int(number) for number in path.read_text().split()]


def ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def end(pid: int) -> None:
    if not ended(pid):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("program", [EVALUATES, COMPILES], ids=["worker", "compiler"])
def test_busy_process_does_not_outlive_a_killed_parent(program: str, pids: Path, tmp_path: Path) -> None:
    parent = start(program, tmp_path)
    busy, started = written(pids)
    parent.kill()
    parent.wait()
    gone = within(5, lambda: ended(busy))
    end(busy)
    end(started)
    assert gone


@pytest.mark.parametrize("program", [EVALUATES, COMPILES], ids=["worker", "compiler"])
def test_interrupt_leaves_nothing_behind(program: str, pids: Path, tmp_path: Path) -> None:
    parent = start(program, tmp_path)
    everyone = written(pids)
    parent.send_signal(signal.SIGINT)
    parent.wait(20)
    gone = within(5, lambda: all(map(ended, everyone)))
    for pid in everyone:
        end(pid)
    assert gone


def test_what_a_late_compile_started_ends_with_it(pids: Path) -> None:
    with a_pool(Short()) as compiler:
        assert compiler.result(BUSY, CASE).status is Status.TIMEOUT
        everyone = written(pids)
        gone = within(2, lambda: all(map(ended, everyone)))
    for pid in everyone:
        end(pid)
    assert gone


def test_compiler_killed_before_it_began_a_job_costs_no_job() -> None:
    """Its pipe took the job all the same, so only the child can say that it has begun."""
    with a_pool() as compiler:
        assert compiler.result(Stage("writes_nothing", {"nth": 1}), CASE).status is Status.OK
        [idle] = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
        idle.suspend()
        compiler.submit(Stage("writes_nothing", {"nth": 2}), CASE)
        idle.kill()
        found = compiler.result(Stage("writes_nothing", {"nth": 2}), CASE)
    assert found.status is Status.OK, found.reason


def test_talk_of_a_candidate_stays_off_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with DeviceSession("interpret", hooks=("bad_candidates:install",)) as session:
        outcome = session.evaluate(CASE, Stage("talks", {}), MeasureOptions(), run_limit_s=30)
    assert outcome.status is Status.OK
    said = capfd.readouterr()
    assert "talk of" not in said.out
    assert "talk of python" in said.err
    assert "talk of C" in said.err


@pytest.mark.parametrize(
    ("program", "environment"),
    [(INTERPRETS, {}), (COMPILES_ONE, {"TRITON_INTERPRET": "1"})],
    ids=["interpreter", "compiler"],
)
def test_triton_in_the_main_module_changes_nothing(program: str, environment: dict[str, str], tmp_path: Path) -> None:
    """A child imports it before our code runs, and Triton decides on import whether it interprets."""
    values = load_family("gqa_attention").registry["norm_rope"].default(CASE, INTERPRETER_LIMITS)
    script = tmp_path / "parent.py"
    script.write_text(f"import triton\nVALUES = {dict(values)!r}\n{HEAD}{program}")
    answer = subprocess.run(
        [sys.executable, str(script)], env=a_child_environment(**environment), capture_output=True, text=True
    )
    assert answer.stdout == "ok\n", answer.stdout + answer.stderr[-2000:]


@pytest.mark.parametrize("before", [None, "0"])
def test_environment_of_this_process_is_left_alone(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    if before is not None:
        monkeypatch.setenv("TRITON_INTERPRET", before)
    with DeviceSession("interpret") as session:
        assert session.describe().environment.kind == "interpret"
        assert os.environ.get("TRITON_INTERPRET") == before
