"""`lookup`: grades, layers, the nearest rule, and records that must not be served."""

import dataclasses
import json
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_family import FAMILY, LAUNCHES
from served import H200, PROBLEM, a_case, a_machine, a_plan, a_record

from tilewright.kernel_templates.inputs import make_inputs
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.runtime import Grade, Lookup, dispatch, lookup
from tilewright.runtime.layers import Layer
from tilewright.runtime.machine import machine_of

Serve = Callable[..., None]


def grade_of(found: Lookup) -> tuple[Grade, Layer]:
    return found.grade, found.layer


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA_H200", " NVIDIA  H200"])
def test_spellings_of_one_gpu_name_hit(serve: Serve, name: str) -> None:
    serve(a_record(a_case()))
    found = lookup(a_case(), a_machine(gpu_name=name))
    assert (grade_of(found), found.plan) == ((Grade.EXACT, Layer.USER), a_plan())


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3"])
def test_another_gpu_is_foreign_and_the_miss_names_what_was_searched(
    serve: Serve, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    serve(a_record(a_case()))
    found = lookup(a_case(), a_machine(gpu_name=name))
    assert grade_of(found) == (Grade.DEFAULT, Layer.DEFAULT)
    assert [p.grade for p in found.passed_over] == [Grade.FOREIGN]
    assert found.passed_over[0].differences == (f"gpu_name NVIDIA H200 there, {name} here",)
    assert all(text in caplog.text for text in (name, a_case().key))


@pytest.mark.parametrize(
    "change",
    [{"sm_count": 60}, {"memory_bytes": 70 << 30}, {"capability": "10.0"}, {"mig": "1g.18gb"}, {"kind": "replay"}],
)
def test_every_identity_field_counts(serve: Serve, change: dict[str, Any]) -> None:
    serve(a_record(a_case()))
    found = lookup(a_case(), a_machine(**change))
    assert [p.grade for p in found.passed_over] == [Grade.FOREIGN]


@pytest.mark.parametrize(
    ("version", "difference"),
    [
        ("3.10.0", "triton 3.6.0 there, 3.10.0 here (older)"),
        ("3.5.1", "triton 3.6.0 there, 3.5.1 here (newer)"),
    ],
)
def test_another_triton_makes_a_record_stale(serve: Serve, version: str, difference: str) -> None:
    serve(a_record(a_case()))
    found = lookup(a_case(), a_machine(triton=version))
    assert found.grade is Grade.DEFAULT
    assert [(p.grade, p.differences) for p in found.passed_over] == [(Grade.STALE, (difference,))]


@pytest.mark.parametrize("version", ["3.6.0+gitabc", "3.6"])
def test_a_local_build_tag_is_the_same_triton(serve: Serve, version: str) -> None:
    serve(a_record(a_case()))
    assert lookup(a_case(), a_machine(triton=version)).grade is Grade.EXACT


def test_another_template_source_makes_a_record_stale(serve: Serve) -> None:
    serve(a_record(a_case(), source_hash="0" * 16))
    found = lookup(a_case(), a_machine())
    assert (found.grade, [p.grade for p in found.passed_over]) == (Grade.DEFAULT, [Grade.STALE])


def test_a_template_that_is_gone_makes_a_record_stale(serve: Serve) -> None:
    serve(a_record(a_case(), plan=[{"template": "old", "values": {}}]))
    found = lookup(a_case(), a_machine())
    assert found.passed_over[0].differences == ("template old is not here any more",)


def test_another_driver_or_torch_is_compatible_and_served(serve: Serve) -> None:
    serve(a_record(a_case(), environment=dataclasses.replace(H200, torch="2.12.0", driver="580.1")))
    found = lookup(a_case(), a_machine())
    assert (found.grade, found.plan) == (Grade.COMPATIBLE, a_plan())
    assert found.differences == ("torch 2.12.0 there, 2.11.0+cu130 here (newer)",)


OTHER_WORK = {
    "float16": PROBLEM.with_dtype("float16"),
    "48 query heads": PROBLEM.with_constants(num_attention_heads=48),
    "4 kv heads": PROBLEM.with_constants(num_key_value_heads=4),
    "another hidden size": PROBLEM.with_constants(hidden_size=5120),
}


@pytest.mark.parametrize("problem", OTHER_WORK.values(), ids=OTHER_WORK)
def test_a_record_of_another_variant_is_never_served(serve: Serve, problem: Any) -> None:
    serve(a_record(a_case()))
    assert lookup(problem.case(batch_size=4, seq_len=512), a_machine()).grade is Grade.DEFAULT


def test_layers_are_asked_in_order(serve: Serve) -> None:
    plans = {Layer.EXPLICIT: a_plan(32), Layer.USER: a_plan(64), Layer.SHIPPED: a_plan(128)}
    for layer, plan in plans.items():
        serve(a_record(a_case(), plan=plan.to_json()), layer=layer)
    assert lookup(a_case(), a_machine(), db="some.sqlite").plan == a_plan(32)
    assert lookup(a_case(), a_machine()).plan == a_plan(64)
    serve(layer=Layer.USER)
    assert grade_of(lookup(a_case(), a_machine())) == (Grade.EXACT, Layer.SHIPPED)


def test_the_environment_variable_names_an_explicit_database(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(a_record(a_case()), layer=Layer.EXPLICIT)
    monkeypatch.setenv("TILEWRIGHT_DB", "some.sqlite")
    found = lookup(a_case(), a_machine())
    assert (found.layer, found.source) == (Layer.EXPLICIT, "some.sqlite")


def test_an_exact_record_of_a_later_layer_beats_a_near_one_of_an_earlier(serve: Serve) -> None:
    serve(a_record(a_case(4, 500)), layer=Layer.USER)
    serve(a_record(a_case(4, 512)), layer=Layer.SHIPPED)
    assert grade_of(lookup(a_case(4, 512), a_machine())) == (Grade.EXACT, Layer.SHIPPED)


def cut(plan: list[dict[str, Any]]) -> Any:
    return str(plan)[: len(str(plan)) // 2]


def with_values(**values: Any) -> list[dict[str, Any]]:
    return [{"template": "projection", "values": values}, *a_plan().to_json()[1:]]


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (cut(a_plan().to_json()), "not a fusion plan"),
        (None, "not a fusion plan"),
        (with_values(BLOCK_M=64, BLOCK_X=1), "no parameter 'BLOCK_X'"),
        (with_values(BLOCK_M=100), "BLOCK_M=100 is not among"),
        (with_values(), "BLOCK_M is missing"),
    ],
)
def test_a_malformed_plan_is_skipped_with_one_warning_that_names_it(
    serve: Serve, plan: Any, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = a_record(a_case())
    serve(dataclasses.replace(broken, record=dataclasses.replace(broken.record, plan=plan)))
    for machine in (a_machine(), a_machine()):
        assert lookup(a_case(), machine).grade is Grade.DEFAULT
    said = [r.getMessage() for r in caplog.records if "is skipped" in r.getMessage()]
    assert len(said) == 1
    assert all(text in said[0] for text in (complaint, "b4s512", broken.record.digest))


def test_a_record_that_the_database_calls_invalid_is_skipped_with_one_warning(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serve(dataclasses.replace(a_record(a_case(), plan=[]), invalid="plan is cut off"))
    assert lookup(a_case(), a_machine()).grade is Grade.DEFAULT
    assert caplog.text.count("plan is cut off") == 1


def test_an_untuned_shape_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = a_machine()
    for _ in range(1000):
        found = lookup(a_case(5, 777), machine)
    assert (found.grade, found.record) == (Grade.DEFAULT, None)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert all(text in warnings[0] for text in ("NVIDIA H200", "bfloat16", "b5s777"))


def test_many_untuned_shapes_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    machine = a_machine()
    for seq_len in range(1, 50):
        lookup(a_case(1, seq_len), machine)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_a_tuned_ragged_shape_is_an_exact_hit(serve: Serve) -> None:
    serve(a_record(a_case(3, 1500)))
    assert lookup(a_case(3, 1500), a_machine()).grade is Grade.EXACT


def test_a_lookup_is_remembered(serve: Serve) -> None:
    serve(a_record(a_case()))
    machine = a_machine()
    assert lookup(a_case(), machine) is lookup(a_case(), machine)


def test_forget_sees_records_that_were_tuned_since(serve: Serve) -> None:
    serve()
    machine = a_machine()
    assert lookup(a_case(), machine).grade is Grade.DEFAULT
    serve(a_record(a_case()))
    assert lookup(a_case(), machine).grade is Grade.EXACT


def test_threads_share_one_answer(serve: Serve) -> None:
    serve(a_record(a_case()))
    machine = a_machine()
    answers: list[Lookup] = []
    threads = [threading.Thread(target=lambda: answers.append(lookup(a_case(), machine))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(answer) for answer in answers}) == 1


def test_the_newest_of_two_equal_records_is_served(serve: Serve) -> None:
    other = dataclasses.replace(H200, power_limit_w=500.0)
    new = a_record(a_case(), environment=other, plan=a_plan(32).to_json(), created_at=datetime(2026, 2, 1, tzinfo=UTC))
    serve(a_record(a_case()), new)
    assert lookup(a_case(), a_machine()).record is new


def test_explanations_are_plain_json(serve: Serve) -> None:
    serve(a_record(a_case()))
    document = json.loads(json.dumps(lookup(a_case(), a_machine(triton="3.9.0")).to_json()))
    assert (document["schema"], document["grade"], document["passed_over"][0]["grade"]) == (1, "default", "stale")


def test_interpreter_records_serve_the_interpreter_alone(serve: Serve) -> None:
    serve(a_record(a_case(), environment=machine_of("interpret").environment))
    assert lookup(a_case(), "interpret").grade is Grade.EXACT
    assert lookup(a_case(), a_machine()).grade is Grade.DEFAULT


def serve_whole_plan(serve: Serve, template: str) -> dict[str, Any]:
    """Inputs of a small case whose record on the interpreter is this one template."""
    small = PROBLEM.with_constants(**PROBLEM.smoke_constants).case(batch_size=1, seq_len=5)
    plan = FusionPlan((Stage(template, {}),))
    source_hash = FAMILY.registry.source_hash(plan)
    environment = machine_of("interpret").environment
    serve(a_record(small, plan=plan.to_json(), source_hash=source_hash, environment=environment))
    return make_inputs(small, "cpu")


def test_dispatch_runs_the_plan_that_was_looked_up(serve: Serve) -> None:
    dispatch(**serve_whole_plan(serve, "whole"))
    assert LAUNCHES == ["whole"]


def test_a_plan_that_does_not_build_gives_way_to_the_default_with_one_warning(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    given = serve_whole_plan(serve, "unbuildable")
    first, second = dispatch(**given), dispatch(**given)
    assert torch.equal(first, second)
    assert LAUNCHES == ["projection", "norm_rope", "attention", "output"] * 2
    assert caplog.text.count("is not used any more") == 1


def test_a_missing_explicit_database_is_one_warning_and_is_not_created(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "nowhere.sqlite"
    for machine in (a_machine(), a_machine()):
        assert lookup(a_case(), machine, db=missing).grade is Grade.DEFAULT
    assert caplog.text.count("nowhere.sqlite") == 1
    assert not missing.exists()
