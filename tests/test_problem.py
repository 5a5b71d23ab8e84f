"""Problems as data: loading, axes, cases, floors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright import expressions
from tilewright.errors import ProblemError
from tilewright.kernel_templates.gqa_attention.reference import OPS
from tilewright.kernel_templates.inputs import InputOptions, make_inputs
from tilewright.kernel_templates.reference import cast, run_ops
from tilewright.problem import PROBLEMS_DIR, Ceilings, load_problem, problem_names

H200 = Ceilings(flops_per_s=790e12, bytes_per_s=4.3e12)


def test_three_problems_are_shipped() -> None:
    assert problem_names() == ("glm_4_5_air_attention", "gqa_attention_with_qk_norm", "qwen3_attention")


def test_full_suite_is_the_published_workload() -> None:
    cases = load_problem().suite("full")
    assert [case.name for case in cases[:4]] == ["b1s128", "b4s128", "b16s128", "b2s256"]
    assert len(cases) == 16


@pytest.mark.parametrize(
    ("text", "name"),
    [("b4s512", "b4s512"), ("batch_size=4,seq_len=512", "b4s512"), ("seq_len=7, batch_size=2", "b2s7")],
)
def test_both_ways_to_write_a_case(text: str, name: str) -> None:
    assert load_problem().parse_case(text).name == name


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("b4", "write bNsN or batch_size=N,seq_len=N"),
        ("b4s0", "seq_len must be a whole number of at least 1, got 0"),
        ("b0s4", "batch_size must be a whole number of at least 1, got 0"),
        ("b4s-5", "got -5"),
        ("batch_size=4", "axis seq_len is missing"),
        (
            "batch_size=4,seq_len=8,hidden_size=8",
            "hidden_size=8 contradicts gqa_attention_with_qk_norm, where it is 4096",
        ),
        ("batch_size=4,seq_len=8,q_out_features=8", "where it is 12288"),
        ("batch_size=4,seq_len=8,heads=8", "unknown axis 'heads'"),
        ("batch_size=4,batch_size=5,seq_len=8", "names axis batch_size twice"),
        ("batch_size=4,seq_len=x", "is not understood"),
    ],
)
def test_bad_case_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ProblemError, match=complaint):
        load_problem().parse_case(text)


def test_constants_may_be_repeated() -> None:
    assert load_problem().parse_case("batch_size=4,seq_len=8,hidden_size=4096").name == "b4s8"


def test_unknown_problem_names_the_known_ones() -> None:
    with pytest.raises(ProblemError, match="shipped: glm_4_5_air_attention"):
        load_problem("nothing")


@pytest.mark.parametrize(
    ("name", "floor_us"), [("b1s128", 51), ("b4s293", 334), ("b8s373", 859), ("b2s2048", 1392), ("b32s256", 2328)]
)
def test_floor_agrees_with_the_measured_roofline(name: str, floor_us: float) -> None:
    assert load_problem().parse_case(name).floor_us(H200) == pytest.approx(floor_us, rel=0.01)


def test_key_tells_dtype_weights_chain_and_sizes_apart() -> None:
    problem = load_problem()
    cases = [
        problem.case(batch_size=1, seq_len=8),
        problem.case(batch_size=2, seq_len=8),
        problem.with_dtype("float16").case(batch_size=1, seq_len=8),
        problem.with_constants(num_attention_heads=48, num_key_value_heads=4).case(batch_size=1, seq_len=8),
        problem.case(batch_size=1, seq_len=8, weight_mode="packed"),
        load_problem("glm_4_5_air_attention").case(batch_size=1, seq_len=8),
        load_problem("qwen3_attention").case(batch_size=1, seq_len=8),
    ]
    assert len({case.key for case in cases}) == len(cases)


def test_smoke_suite_has_ragged_lengths_and_small_heads() -> None:
    cases = load_problem().suite("smoke")
    assert any(case["seq_len"] % 16 for case in cases)
    assert all(case["hidden_size"] <= 256 for case in cases)


def test_missing_field_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(PROBLEMS_DIR / "qwen3_attention", folder)
    definition = json.loads((folder / "definition.json").read_text())
    del definition["outputs"]
    (folder / "definition.json").write_text(json.dumps(definition))
    with pytest.raises(ProblemError, match="field 'outputs' is missing"):
        load_problem(str(folder))


def test_op_that_reads_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(PROBLEMS_DIR / "qwen3_attention", folder)
    tuning = json.loads((folder / "tuning.json").read_text())
    tuning["ops"][0]["reads"].append("q_proj_bias")
    (folder / "tuning.json").write_text(json.dumps(tuning))
    with pytest.raises(ProblemError, match="op qkv_projection uses unknown tensor 'q_proj_bias'"):
        load_problem(str(folder))


@pytest.mark.parametrize("name", problem_names())
def test_chain_of_ops_equals_the_definition(name: str) -> None:
    """The published reference, as text in the definition, is the truth that our op-by-op oracle must meet."""
    problem = load_problem(name)
    for case in problem.suite("smoke"):
        inputs = make_inputs(case, "cpu", InputOptions(seed=3, random_norm_weights=True))
        namespace: dict[str, object] = {}
        exec(problem.reference.replace("dim = 128", f"dim = {case['head_dim']}"), namespace)
        wide = cast(inputs, torch.float64)
        expected = namespace["run"](**wide)  # type: ignore[operator]
        found = run_ops(OPS, problem.op_names, wide, case)["output"]
        # The definition's norm rounds through float32 on its way; the rest is float64.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 99), st.integers(1, 99))
def test_expressions_are_integer_arithmetic(a: int, b: int) -> None:
    assert expressions.evaluate("(a + 2 * b) // 3 - a % b", {"a": a, "b": b}) == (a + 2 * b) // 3 - a % b


@pytest.mark.parametrize("text", ["__import__('os')", "a.b", "a[0]", "a **", "1 / 2", "True"])
def test_expressions_refuse_everything_else(text: str) -> None:
    with pytest.raises(ProblemError):
        expressions.evaluate(text, {"a": 1})
