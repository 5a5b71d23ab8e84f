"""What is wrong is rejected, each for its own reason, and what is right is accepted."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from kernel_checks import a_case

from tilewright.db.rows import Status
from tilewright.kernel_templates.base import Run, Template, Tensors, Values
from tilewright.kernel_templates.device import INTERPRETER_LIMITS
from tilewright.kernel_templates.families import Family, load_family
from tilewright.kernel_templates.gqa_attention import reference, seeded_wrong
from tilewright.kernel_templates.gqa_attention.seeded_wrong import CONTROLS, SEEDED, Seeded, plan_with
from tilewright.kernel_templates.inputs import InputOptions
from tilewright.kernel_templates.plan import Registry, Stage
from tilewright.problem import WorkloadCase, load_problem
from tilewright.search.case_state import Bound, CaseState
from tilewright.search.verify import Finding, neighbours, quick_check, replay_check, strict_check

CPU = torch.device("cpu")
CASE = load_problem().suite("smoke")[0]  # b1s16
RAGGED = load_problem().suite("smoke")[1]  # b2s33
REGISTRY = load_family(CASE.problem.family).registry
QUICK = [seeded for seeded in SEEDED if not seeded.strict]


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    yield
    seeded_wrong.CACHED_OUTPUT.forget()


@pytest.fixture(scope="module")
def state() -> CaseState:
    return CaseState(CASE, seeded_wrong.FAMILY, CPU)


def name_of(seeded: Any) -> str:
    return str(seeded.template.name if isinstance(seeded, Seeded) else seeded.name)


@pytest.mark.parametrize("seeded", QUICK, ids=name_of)
def test_seeded_wrong_stage_is_rejected_for_its_own_reason(seeded: Seeded, state: CaseState) -> None:
    finding = quick_check(state, Stage(seeded.template.name, {}))
    assert finding.status is Status.WRONG
    assert seeded.reason in finding.reason


@pytest.mark.parametrize("seeded", QUICK, ids=name_of)
def test_seeded_wrong_stage_spoils_a_whole_plan(seeded: Seeded, state: CaseState) -> None:
    if seeded.reason == "changes its input qkv":
        pytest.skip("inside a plan nobody reads qkv again")
    assert quick_check(state, plan_with(seeded.template, CASE)).status is Status.WRONG


@pytest.mark.parametrize("seeded", [seeded for seeded in SEEDED if seeded.strict], ids=name_of)
def test_right_at_whole_tiles_alone_passes_the_quick_check_and_fails_the_strict_one(
    seeded: Seeded, state: CaseState
) -> None:
    plan = plan_with(seeded.template, CASE)
    assert quick_check(state, plan).status is Status.OK
    finding = strict_check(seeded_wrong.FAMILY, CASE, plan, CPU, INTERPRETER_LIMITS)
    assert finding.status is Status.WRONG
    assert seeded.reason in finding.reason


@pytest.mark.parametrize("control", CONTROLS, ids=name_of)
@pytest.mark.parametrize("case", [CASE, RAGGED], ids=lambda case: case.name)
def test_same_machinery_with_nothing_wrong_is_accepted(control: Template, case: WorkloadCase) -> None:
    finding = quick_check(CaseState(case, seeded_wrong.FAMILY, CPU), Stage(control.name, {}))
    assert finding == Finding(error_ratio=1.0)


def test_plan_of_nothing_wrong_passes_the_strict_check() -> None:
    plan = plan_with(CONTROLS[0], CASE)
    finding = strict_check(seeded_wrong.FAMILY, CASE, plan, CPU, INTERPRETER_LIMITS)
    assert finding == Finding(error_ratio=1.0, deterministic=True)


@pytest.mark.parametrize("name", list(REGISTRY))
@pytest.mark.parametrize("case", load_problem().suite("smoke"), ids=lambda case: case.name)
def test_default_of_every_registered_template_is_accepted(name: str, case: WorkloadCase) -> None:
    values = REGISTRY[name].default(case, INTERPRETER_LIMITS)
    if REGISTRY[name].rejection(values, case, INTERPRETER_LIMITS):
        pytest.skip("not for this case")
    finding = quick_check(CaseState(case, load_family(case.problem.family), CPU), Stage(name, values))
    assert finding.status is Status.OK, finding.reason


@pytest.mark.parametrize("packed", [False, True])
def test_default_plan_passes_the_strict_check(packed: bool) -> None:
    case = dataclasses.replace(CASE, weight_mode="packed" if packed else "separate")
    plan = REGISTRY.default_plan(case, INTERPRETER_LIMITS)
    finding = strict_check(load_family(case.problem.family), case, plan, CPU, INTERPRETER_LIMITS)
    assert finding.status is Status.OK, finding.reason
    assert finding.deterministic


Change = Callable[[tuple[int, ...], list[Any], dict[str, Any]], tuple[int, ...]]


def tampered(name: str, change: Change) -> Family:
    """A real kernel of the family, launched with something changed."""
    template = REGISTRY[name]

    def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
        def changed(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> Any:
            arguments, named = list(args), dict(options)
            grid = change(grid, arguments, named)
            return run(kernel, grid, *arguments, **named)

        template.launch(tensors, values, case, changed)

    return Family(Registry([dataclasses.replace(template, launch=launch)]), reference.OPS, {})


def one_program_short(grid: tuple[int, ...], args: list[Any], options: dict[str, Any]) -> tuple[int, ...]:
    return (grid[0] - 1, *grid[1:])


def wrong_scale(grid: tuple[int, ...], args: list[Any], options: dict[str, Any]) -> tuple[int, ...]:
    options["SCALE_LOG2"] *= 1.25
    return grid


def tables_exchanged(grid: tuple[int, ...], args: list[Any], options: dict[str, Any]) -> tuple[int, ...]:
    args[3], args[4] = args[4], args[3]
    return grid


def no_norm(grid: tuple[int, ...], args: list[Any], options: dict[str, Any]) -> tuple[int, ...]:
    options["HAS_NORM"] = False
    return grid


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("flash_attention", one_program_short, "values are not finite"),
        ("flash_attention", wrong_scale, "context: relative error"),
        ("norm_rope", tables_exchanged, "qkv: relative error"),
        ("norm_rope", no_norm, "qkv: relative error"),
        ("norm_rope", one_program_short, "error"),
    ],
)
def test_real_kernel_with_one_thing_changed_is_rejected(name: str, change: Change, reason: str) -> None:
    values = REGISTRY[name].default(CASE, INTERPRETER_LIMITS)
    finding = quick_check(CaseState(CASE, tampered(name, change), CPU), Stage(name, values))
    assert finding.status is Status.WRONG
    assert reason in finding.reason


def test_capture_that_missed_a_launch_is_rejected(state: CaseState) -> None:
    """An empty graph is very fast."""
    held = Bound(state, plan_with(CONTROLS[0], CASE), InputOptions())
    assert replay_check(state, held, held.run, InputOptions()).status is Status.OK
    finding = replay_check(state, held, lambda: None, InputOptions())
    assert finding.status is Status.WRONG
    assert "as it is timed" in finding.reason


def test_input_spoiled_while_it_was_timed_is_noticed_and_made_anew() -> None:
    state = CaseState(CASE, seeded_wrong.FAMILY, CPU)
    options = InputOptions()
    kept = state.inputs(options)["q_proj_weight"].clone()
    state.note_inputs(options, 3)
    assert state.changed_inputs(options, 3) == []
    state.inputs(options)["q_proj_weight"][0, 0] += 1
    state.before(options, 3)["qkv"][0, 0, 0] += 1
    assert state.changed_inputs(options, 3) == ["q_proj_weight", "qkv"]
    assert torch.equal(state.inputs(options)["q_proj_weight"], kept)
    assert state.changed_inputs(options, 3) == []


def test_plan_that_differs_from_run_to_run_is_called_so() -> None:
    calls: list[int] = []

    def restless(t: Tensors, case: WorkloadCase, made: Mapping[str, torch.Tensor]) -> None:
        seeded_wrong.write_all(t, case, made)
        calls.append(1)
        t["output"].view(-1)[0] *= 1 + 0.004 * (len(calls) % 2)

    template = dataclasses.replace(
        seeded_wrong.FAMILY.registry["true_output_projection"],
        launch=seeded_wrong._template("restless", ("output_projection",), write=restless).launch,
    )
    family = dataclasses.replace(seeded_wrong.FAMILY, registry=Registry((*CONTROLS, template)))
    finding = strict_check(family, CASE, plan_with(template, CASE), CPU, INTERPRETER_LIMITS)
    assert finding.status is Status.OK
    assert not finding.deterministic


def test_neighbours_are_ragged_and_never_the_case_itself() -> None:
    lengths = {case["seq_len"] for case in neighbours(a_case(seq_len=1024, batch_size=4))}
    assert lengths == {1023, 1025, 61}
    assert {case["seq_len"] for case in neighbours(a_case(seq_len=1))} == {2, 61}
