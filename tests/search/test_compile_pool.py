"""Compiling ahead: a bad compile costs itself, and what is compiled here is what a launch looks up."""

import os
from collections.abc import Iterator

import pytest

from tilewright.db.rows import Status
from tilewright.kernel_templates.device import named_limits
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import Stage
from tilewright.problem import load_problem
from tilewright.search.compile_pool import CompileLimit, PooledCompiler

LIMITS = named_limits(90, 132)
CASE = load_problem().parse_case("b1s128")


def pool(limit: CompileLimit | None = None) -> PooledCompiler:
    return PooledCompiler(
        "gqa_attention", LIMITS, processes=2, hooks=("bad_candidates:install_bad_compiler",), limit=limit
    )


class Short(CompileLimit):
    @property
    def limit_s(self) -> float:
        return 6.0


@pytest.fixture(scope="module")
def bad_pool() -> Iterator[PooledCompiler]:
    with pool(Short()) as opened:
        yield opened


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("raises", Status.COMPILE_ERROR, "ZeroDivisionError"),
        ("aborts", Status.CRASHED, "signal 6"),
        ("segfaults", Status.CRASHED, "signal 11"),
        ("endless", Status.TIMEOUT, "compile limit 6 s"),
    ],
)
def test_bad_compile_costs_itself_alone(bad_pool: PooledCompiler, fault: str, status: Status, reason: str) -> None:
    bad_pool.submit(Stage(fault, {}), CASE)
    bad_pool.submit(Stage("writes_nothing", {"nth": fault}), CASE)
    found = bad_pool.result(Stage(fault, {}), CASE)
    assert (found.status, reason in found.reason) == (status, True), found.reason
    assert bad_pool.result(Stage("writes_nothing", {"nth": fault}), CASE).status is Status.OK


def test_limit_falls_to_what_compiles_take_but_not_below_fifteen_seconds() -> None:
    limit = CompileLimit()
    assert limit.limit_s == 60
    limit.seconds += [1.0] * 20
    assert limit.limit_s == 15
    assert CompileLimit([30.0] * 20).limit_s == 30


def test_kernel_is_compiled_for_a_card_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers and shared memory are known; the interpreter's switch in this process changes nothing."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    template = load_family("gqa_attention").registry["norm_rope"]
    stage = Stage("norm_rope", template.default(CASE, LIMITS))
    with PooledCompiler("gqa_attention", LIMITS, processes=1) as compiler:
        found = compiler.result(stage, CASE)
        assert found.status is Status.OK
        assert found.facts.registers is not None
        assert 16 <= found.facts.registers <= 255
        assert found.facts.spill_bytes == 0
        assert compiler.result(stage, CASE) is found


def test_shared_memory_over_the_limit_is_a_reason_with_numbers() -> None:
    small = named_limits(86, 80)
    template = load_family("gqa_attention").registry["output_projection"]
    hungry = {**template.default(CASE, LIMITS), "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_stages": 5}
    hungry = {**hungry, "USE_TMA": False, "PERSISTENT": False, "STORE": "pointer", "SPLIT_K": 1}
    with PooledCompiler("gqa_attention", small, processes=1) as compiler:
        found = compiler.result(Stage("output_projection", hungry), CASE)
    assert found.status is Status.OUT_OF_RESOURCES
    assert f"the limit is {small.shared_memory_bytes}" in found.reason
