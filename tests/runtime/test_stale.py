"""Stale records where they are allowed, plans that fail, and the quarantine that remembers them."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import a_case as small_case
from calls import arguments, reference
from eager_family import FAMILY, LAUNCHES
from served import H200, a_case, a_machine, a_plan, a_record

from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.runtime import Grade, check, dispatch, engine, forget, lookup
from tilewright.runtime.layers import Layer
from tilewright.runtime.machine import machine_of
from tilewright.runtime.quarantine import Failed, put, quarantine_file

Serve = Callable[..., None]
DEFAULT = ["projection", "norm_rope", "attention", "output"]


def whole(template: str, **environment: Any) -> Any:
    """A record of the small case on the interpreter, of one template; `environment` changes where it was tuned."""
    plan = FusionPlan((Stage(template, {}),))
    there = dataclasses.replace(machine_of("interpret").environment, **environment)
    source_hash = FAMILY.registry.source_hash(plan)
    return a_record(small_case(), plan=plan.to_json(), digest=plan.digest, source_hash=source_hash, environment=there)


def other_triton(version: str, block_m: int = 64) -> Any:
    return a_record(a_case(), plan=a_plan(block_m).to_json(), environment=dataclasses.replace(H200, triton=version))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def entries() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(quarantine_file().read_text())["entries"]
    return found


@pytest.mark.parametrize(
    ("asked", "variable", "grade"),
    [
        (None, None, Grade.DEFAULT),
        (None, "0", Grade.DEFAULT),
        (None, "1", Grade.STALE),
        (True, None, Grade.STALE),
        (False, "1", Grade.DEFAULT),
    ],
)
def test_a_stale_record_serves_only_where_it_is_allowed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, asked: bool | None, variable: str | None, grade: Grade
) -> None:
    serve(other_triton("3.5.0"))
    if variable is not None:
        monkeypatch.setenv("TILEWRIGHT_ALLOW_STALE", variable)
    assert lookup(a_case(), a_machine(), allow_stale=asked).grade is grade


def test_a_word_that_is_neither_yes_nor_no_allows_nothing_and_is_warned_of(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serve(other_triton("3.5.0"))
    monkeypatch.setenv("TILEWRIGHT_ALLOW_STALE", "maybe")
    assert lookup(a_case(), a_machine()).grade is Grade.DEFAULT
    assert "TILEWRIGHT_ALLOW_STALE must be 1 or 0, got 'maybe'" in caplog.text


def test_of_stale_records_that_of_the_newest_compiler_serves(serve: Serve) -> None:
    """As versions: 3.10 comes after 3.9."""
    serve(other_triton("3.9.1", 32), other_triton("3.10.0", 64), other_triton("3.9.0", 128))
    found = lookup(a_case(), a_machine(triton="3.11.0"), allow_stale=True)
    assert (found.plan, found.differences) == (a_plan(64), ("triton 3.10.0 there, 3.11.0 here (older)",))


def test_a_near_shape_goes_before_a_stale_record(serve: Serve) -> None:
    serve(other_triton("3.5.0"), a_record(a_case(4, 500)))
    assert lookup(a_case(), a_machine(), allow_stale=True).grade is Grade.TRANSFERRED


def test_a_foreign_record_never_serves(serve: Serve) -> None:
    serve(a_record(a_case(), environment=dataclasses.replace(H200, gpu_name="NVIDIA H100", triton="3.5.0")))
    assert lookup(a_case(), a_machine(), allow_stale=True).grade is Grade.DEFAULT


def test_a_stale_plan_is_checked_once_then_serves(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_ALLOW_STALE", "1")
    serve(whole("whole", triton="3.5.0"))
    given = arguments(small_case())
    for _ in range(2):
        assert torch.equal(dispatch(**given), reference(small_case(), given))
    launches = len(check.CHECKED) + 2
    assert LAUNCHES.count("whole") == len(LAUNCHES) == launches


def test_a_stale_plan_that_is_wrong_never_sees_the_callers_tensors(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TILEWRIGHT_ALLOW_STALE", "1")
    serve(whole("wrong", triton="3.5.0"))
    given = arguments(small_case())
    assert torch.equal(dispatch(**given), reference(small_case(), given))
    assert (LAUNCHES[0], LAUNCHES[1:]) == ("wrong", DEFAULT)
    assert [entry["case"] for entry in entries()] == [small_case().key]
    [said] = warnings_in(caplog)
    assert "WrongOutput: output: relative error" in said


def test_what_cannot_be_checked_does_not_serve_and_is_not_held_against_the_plan(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> str:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setenv("TILEWRIGHT_ALLOW_STALE", "1")
    monkeypatch.setattr(engine, "complaint_against", no_memory)
    serve(whole("whole", triton="3.5.0"))
    dispatch(**arguments(small_case()))
    assert LAUNCHES == DEFAULT
    assert not quarantine_file().exists()


def test_an_exact_record_that_fails_gives_way_to_the_next_best_with_one_warning(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serve(whole("unbuildable"), layer=Layer.USER)
    serve(whole("whole"), layer=Layer.SHIPPED)
    given = arguments(small_case())
    serve_again = [dispatch(**given) for _ in range(3)]
    assert all(torch.equal(output, reference(small_case(), given)) for output in serve_again)
    assert LAUNCHES == ["whole"] * 3
    assert len(warnings_in(caplog)) == 1


def test_the_next_process_does_not_try_the_plan_again(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    serve(whole("unbuildable"))
    dispatch(**arguments(small_case()))
    forget()  # as a new process begins
    caplog.clear()
    found = lookup(small_case(), "interpret")
    assert found.grade is Grade.DEFAULT
    assert "in quarantine: OutOfResources" in found.passed_over[0].obstacle
    [said] = warnings_in(caplog)
    assert "is skipped: in quarantine" in said


@pytest.mark.parametrize("change", [{"triton": "3.7.0"}, {"gpu_name": "NVIDIA H100"}, {"mig": "1g.18gb"}])
def test_quarantine_speaks_of_one_environment(serve: Serve, change: dict[str, str]) -> None:
    registry = load_family("gqa_attention").registry
    put(Failed.of(a_case(), a_plan(), registry, H200), "it failed")
    elsewhere = dataclasses.replace(H200, **change)
    serve(a_record(a_case(), environment=elsewhere))
    assert lookup(a_case(), a_machine(**change)).grade is Grade.EXACT
    serve(a_record(a_case()))
    assert lookup(a_case(), a_machine()).grade is Grade.DEFAULT


def test_where_the_default_fails_too_it_is_the_machine_and_nothing_is_quarantined(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: engine.Launcher, tensors: dict[str, Any]) -> None:
        raise RuntimeError("no ptxas here")

    serve(whole("whole"))
    monkeypatch.setattr(engine.Launcher, "_launch", broken)
    with pytest.raises(RuntimeError, match="no ptxas"):
        dispatch(**arguments(small_case()))
    assert not quarantine_file().exists()


def test_a_lack_of_memory_is_told_to_the_caller(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: engine.Launcher, tensors: dict[str, Any]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    serve(whole("whole"))
    monkeypatch.setattr(engine.Launcher, "_launch", full)
    with pytest.raises(torch.OutOfMemoryError):
        dispatch(**arguments(small_case()))
    assert lookup(small_case(), "interpret").grade is Grade.EXACT


def test_a_folder_that_cannot_be_written_is_a_warning_and_the_process_still_knows(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_QUARANTINE", str(tmp_path / "file" / "quarantine.json"))
    serve(whole("unbuildable"))
    for _ in range(2):
        dispatch(**arguments(small_case()))
    assert LAUNCHES == DEFAULT * 2
    assert "quarantine" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "other"}', '{"schema": "tilewright.quarantine/1"}'])
def test_a_damaged_quarantine_is_warned_of_and_left_as_it_is(
    serve: Serve, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    quarantine_file().parent.mkdir(parents=True)
    quarantine_file().write_text(content)
    serve(whole("unbuildable"))
    dispatch(**arguments(small_case()))
    assert LAUNCHES == DEFAULT
    assert quarantine_file().read_text() == content
    assert "is not used" in caplog.text
