"""The selftest tells what it shows, and fails when one thing is not as it should be."""

import json
from collections.abc import Iterator

import pytest

from tilewright import cli
from tilewright.search import selftest
from tilewright.search.selftest import Check
from tilewright.search.worker import classify

GOOD = Check("rejects what is wrong", True, "wrong: relative error", 0.1)
BAD = Check("rejects what is worse", False, "ok", 0.1)


def answering(*checks: Check) -> "type[object]":
    def found(device: str) -> Iterator[Check]:
        return iter(checks)

    return found  # type: ignore[return-value]


@pytest.mark.parametrize(("checks", "code"), [((GOOD,), 0), ((GOOD, BAD, GOOD), 1)])
def test_exit_code_says_whether_everything_passed(
    checks: tuple[Check, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "_checks", answering(*checks))
    assert cli.run(["selftest", "--device", "interpret"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok" if check.passed else "FAIL" for check in checks]


def test_json_goes_to_stdout_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selftest, "_checks", answering(GOOD, BAD))
    assert cli.run(["selftest", "--device", "interpret", "--json"]) == 1
    told = capsys.readouterr()
    content = json.loads(told.out)
    assert (content["schema"], content["device"], content["passed"]) == ("tilewright.selftest/1", "interpret", False)
    assert [check["passed"] for check in content["checks"]] == [True, False]
    assert BAD.name in told.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "crashed"),
        (RuntimeError("CUDA error: out of memory"), "out_of_resources"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            "out_of_resources",
        ),
        (type("OutOfResources", (Exception,), {})("Required: 300000, Hardware limit: 232448"), "out_of_resources"),
        (type("AcceleratorError", (Exception,), {})("CUDA error: unknown"), "crashed"),
        (type("CompilationError", (Exception,), {})("at 3:4"), "compile_error"),
        (ValueError("a shape"), "error"),
    ],
)
def test_exception_of_a_candidate_is_told_apart(error: Exception, status: str) -> None:
    found, reason = classify(error)
    assert found.value == status
    assert str(error).split(":")[-1] in reason


@pytest.mark.slow
def test_everything_passes_in_the_interpreter() -> None:
    found = selftest.run_selftest("interpret", print)
    assert found["passed"]
    assert len(found["checks"]) > 35
