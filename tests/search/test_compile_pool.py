"""A bad compile costs itself; the others go on."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import faulty
import psutil
import pytest
from child_processes import environment, gone

from tilewright.db.rows import Status
from tilewright.kernel_templates.device import named_limits
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import Stage
from tilewright.problem import load_problem
from tilewright.search.compile_pool import CompileLimit, PooledCompiler

LIMITS = named_limits(90, 132)
SMOKE = load_problem().suite("smoke")[0]


class ShortLimit(CompileLimit):
    """Long enough for what compiles nothing."""

    @property
    def limit_s(self) -> float:
        return 1.0


@pytest.fixture(scope="module")
def pool() -> Iterator[PooledCompiler]:
    faulty.register()
    with PooledCompiler("faulty", LIMITS, processes=1, hooks=(faulty.COMPILE_FAULTS,), limit=ShortLimit()) as made:
        yield made


CASES = iter(range(2, 1000))  # an answer is kept by stage and case: each test asks about cases of its own


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("endless", Status.TIMEOUT, "compile limit 1 s"),
        ("abort", Status.CRASHED, "the compiler died (signal 6)"),
        ("segfault", Status.CRASHED, "the compiler died (signal 11)"),
        ("exit", Status.CRASHED, "the compiler died (exit code 0)"),
        ("raises", Status.COMPILE_ERROR, "ValueError: injected"),
    ],
)
def test_bad_compile_costs_itself_and_the_next_one_goes_on(
    pool: PooledCompiler, fault: str, status: Status, reason: str
) -> None:
    before, after = faulty.a_case(next(CASES)), faulty.a_case(next(CASES))
    assert pool.result(faulty.stage(), before).status is Status.OK
    pool.submit(faulty.stage(fault), before)
    pool.submit(faulty.stage(), after)
    begun = time.monotonic()
    answer = pool.result(faulty.stage(fault), before)
    assert (answer.status, reason in answer.reason) == (status, True)
    assert pool.result(faulty.stage(), after).status is Status.OK
    assert time.monotonic() - begun < 15
    assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]


def test_compiler_killed_while_idle_costs_nothing(pool: PooledCompiler) -> None:
    assert pool.result(faulty.stage(), faulty.a_case(next(CASES))).status is Status.OK
    [child] = pool._children
    child.process.kill()
    child.process.join()
    assert pool.result(faulty.stage(), faulty.a_case(next(CASES))).status is Status.OK


def test_answer_is_kept(pool: PooledCompiler) -> None:
    case = faulty.a_case(next(CASES))
    assert pool.result(faulty.stage(), case) is pool.result(faulty.stage(), case)


def test_time_until_a_process_can_compile_is_not_the_candidates() -> None:
    """Starting takes longer than this limit."""

    class Tiny(CompileLimit):
        @property
        def limit_s(self) -> float:
            return 0.5

    with PooledCompiler("faulty", LIMITS, processes=1, hooks=(faulty.COMPILE_FAULTS,), limit=Tiny()) as pool:
        begun = time.monotonic()
        assert pool.result(faulty.stage(), faulty.a_case()).status is Status.OK
        assert time.monotonic() - begun > 0.5


def test_process_that_cannot_start_is_an_answer() -> None:
    with PooledCompiler("faulty", LIMITS, processes=1, hooks=("faulty:no_such_hook",)) as pool:
        answer = pool.result(faulty.stage(), faulty.a_case())
    assert answer.status is Status.CRASHED
    assert answer.reason == "the compiler died before it could compile (exit code 1)"


def test_limit_is_learned_from_the_first_twenty_and_never_short() -> None:
    limit = CompileLimit()
    assert limit.limit_s == 60
    limit.seconds = [1.0] * 19
    assert limit.limit_s == 60
    limit.seconds = [1.0] * 20
    assert limit.limit_s == 15
    limit.seconds = [float(i) for i in range(1, 21)] + [1.0] * 500
    assert 18 < limit.limit_s < 20
    limit.seconds = [100.0] * 20
    assert limit.limit_s == 60


def test_kernel_is_compiled_for_a_card_that_is_not_here_and_refused_where_it_does_not_fit() -> None:
    """Though this process interprets its kernels."""
    template = load_family(SMOKE.problem.family).registry["qkv_projection"]
    stage = Stage(template.name, template.default(SMOKE, LIMITS))
    with PooledCompiler(SMOKE.problem.family, LIMITS, processes=1) as pool:
        fits = pool.result(stage, SMOKE)
    assert fits.status is Status.OK, fits.reason
    needed = fits.facts.shared_memory_bytes
    assert needed is not None
    assert needed > 0
    assert (fits.facts.registers or 0) > 0
    with PooledCompiler(SMOKE.problem.family, replace(LIMITS, shared_memory_bytes=needed - 1), processes=1) as pool:
        refused = pool.result(stage, SMOKE)
    assert refused.status is Status.OUT_OF_RESOURCES
    assert refused.reason == f"needs {needed} bytes of shared memory, the limit is {needed - 1}"
    assert refused.facts == fits.facts


PARENT = """
import sys, time
import faulty
from tilewright.kernel_templates.device import named_limits
from tilewright.search.compile_pool import PooledCompiler
if __name__ == "__main__":
    pool = PooledCompiler("faulty", named_limits(90, 132), processes=1, hooks=(faulty.COMPILE_FAULTS,))
    pool.result(faulty.stage(), faulty.a_case())
    pool.submit(faulty.stage("endless"), faulty.a_case())
    time.sleep(0.5)
    print(pool._children[0].process.pid, flush=True)
    time.sleep(60)
"""


def test_no_compiler_outlives_a_killed_parent(tmp_path: Path) -> None:
    """Not even one that is busy and would notice nothing."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment())
    assert parent.stdout is not None
    compiler = int(parent.stdout.readline())
    sleeping = [p.pid for p in psutil.Process(compiler).children()]
    parent.kill()
    parent.communicate()
    assert gone(compiler, within_s=5)
    for pid in sleeping:
        psutil.Process(pid).kill()
