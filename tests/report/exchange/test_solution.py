"""Solutions: what is written is valid, runs alone and is right; what is wrong or hostile is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from db_factories import an_env

from tilewright import cli
from tilewright.db.rows import RecordRow, StoredRecord, Verdict
from tilewright.errors import NothingFound, UsageError
from tilewright.kernel_templates.families import load_family
from tilewright.problem import DEFAULT_PROBLEM, Problem, load_problem
from tilewright.report.exchange import dataset
from tilewright.report.exchange.checking import check, write_sources
from tilewright.report.exchange.folder import OutputFolder, safe
from tilewright.report.exchange.schema import Solution, complaints, read_solution
from tilewright.report.exchange.solution import Exported, definition_document, export_solution, limits_of
from tilewright.report.exchange.tiles import file_name, tile_files

PROBLEM = load_problem(DEFAULT_PROBLEM)
SHAPES = ({"batch_size": 1, "seq_len": 128}, {"batch_size": 4, "seq_len": 512})


def a_stored(axes: dict[str, int], **changes: Any) -> StoredRecord:
    """A record of the default plan of Triton templates alone, as an H200 has it."""
    case = PROBLEM.case(**axes)
    bare = StoredRecord(
        RecordRow(case.key, [], "d" * 16, "s", Verdict.BEATS_ALL), an_env(), PROBLEM.name, case.name, axes
    )
    plan = load_family(PROBLEM.family).registry.default_plan(case, limits_of(bare), kinds=("triton",))
    row = dataclasses.replace(bare.record, plan=plan.to_json(), median_us=100.0, low_us=99.0, high_us=101.0, **changes)
    return dataclasses.replace(bare, record=row)


def exported(**options: Any) -> Exported:
    return export_solution(PROBLEM, [a_stored(axes) for axes in SHAPES], author="a test", **options)


def test_the_exported_solution_runs_alone_and_is_right() -> None:
    """A tuned plan and the default, interpreted, with tilewright out of reach, the same launches twice."""
    made = export_solution(PROBLEM, [a_stored(SHAPES[1])], author="a test")
    found = check(read_solution(json.dumps(made.content), "made"), PROBLEM, made.tuned, device="interpret")
    assert [(each.name, each.ok, each.reason) for each in found] == [
        ("default", True, ""),
        ("b4s512", True, ""),
    ]
    assert all(each.error_ratio and each.error_ratio <= 2 for each in found)
    assert any("attention_kernel" in launch for launch in found[-1].launches)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_exported_solution_is_right_on_a_gpu() -> None:
    made = exported()
    found = check(read_solution(json.dumps(made.content), "made"), PROBLEM, made.tuned, device="cuda")
    assert [(each.name, each.reason) for each in found if not each.ok] == []
    assert len(found) == len(SHAPES) + 1


def test_tuned_shapes_are_dispatched_and_their_evidence_stands_beside_them() -> None:
    source = exported().source
    assert "(1, 128): [" in source
    assert "(4, 512): [" in source
    assert "b4s512: 100.0 us" in source


@pytest.mark.parametrize(("dialect", "key"), [("sol", "languages"), ("flashinfer", "language")])
def test_each_dialect_has_its_own_field_for_the_language(dialect: Any, key: str) -> None:
    spec = exported(dialect=dialect).content["spec"]
    assert {"languages", "language"} & set(spec) == {key}
    assert spec["entry_point"] == "kernel.py::run"


def test_a_b200_is_named_and_every_other_card_is_local() -> None:
    other = [dataclasses.replace(a_stored(SHAPES[0]), environment=an_env(gpu_name="NVIDIA B200"))]
    assert export_solution(PROBLEM, other, author="x").content["spec"]["target_hardware"] == ["B200"]
    assert exported().content["spec"]["target_hardware"] == ["LOCAL"]


def test_packed_weights_are_never_exported() -> None:
    with pytest.raises(NothingFound, match="weights are packed"):
        export_solution(PROBLEM, [a_stored(SHAPES[0], weight_mode="packed")], author="x")


def test_the_export_breaks_no_rule_of_the_benchmark() -> None:
    assert complaints(exported().source) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("import numpy", "imports numpy"),
        ("from tilewright import problem", "imports tilewright"),
        ("import threading", "imports threading"),
        ("g = torch.cuda.CUDAGraph()", "calls CUDAGraph"),
        ("f = triton.autotune([], [])(f)", "calls autotune"),
        ("s = torch.cuda.Stream()", "calls Stream"),
        ("m = torch.utils.cpp_extension.load_inline('x', '')", "calls load_inline"),
    ],
)
def test_what_the_benchmark_forbids_is_found(line: str, complaint: str) -> None:
    assert any(complaint in found for found in complaints(f"import torch\n{line}\n"))


def small() -> Problem:
    return dataclasses.replace(PROBLEM.with_constants(**PROBLEM.smoke_constants), tuned_plan_constants={})


def a_solution(body: str, *, dps: bool = True, path: str = "kernel.py") -> Solution:
    names = ", ".join(spec.name for spec in (*PROBLEM.inputs, *(PROBLEM.outputs if dps else ())))
    text = PROBLEM.reference.replace("def run(", "def reference(") + f"\n\ndef run({names}):\n{body}\n"
    spec = {
        "languages": ["pytorch"], "target_hardware": ["LOCAL"], "entry_point": f"{path}::run",
        "destination_passing_style": dps,
    }  # fmt: skip
    content = {
        "name": "n",
        "definition": "d",
        "author": "a",
        "spec": spec,
        "sources": [{"path": path, "content": text}],
    }
    return read_solution(json.dumps(content), "here")


ANSWER = f"reference({', '.join(spec.name for spec in PROBLEM.inputs)})"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"    output.copy_({ANSWER})", ""),
        (f"    q_norm_weight.fill_(1)\n    output.copy_({ANSWER})", "changes its input q_norm_weight"),
        (f"    output[:, 1:].copy_({ANSWER}[:, 1:])", "not finite"),
        (
            f"    q_norm_weight = q_norm_weight * 0 + 1\n    output.copy_({ANSWER})",
            "input set 1: relative error",
        ),
        ("    import tilewright.errors", "must not import tilewright"),
        ("    import os\n    os._exit(3)", "ended after 0 of 1 cases"),
    ],
    ids=lambda text: str(text)[:30],
)
def test_a_solution_is_right_only_where_it_is(body: str, reason: str) -> None:
    (found,) = check(a_solution(body), small(), [], device="interpret")
    assert found.ok is (reason == "")
    assert reason in found.reason


def test_a_solution_that_returns_its_output_is_understood() -> None:
    (found,) = check(a_solution(f"    return {ANSWER}", dps=False), small(), [], device="interpret")
    assert (found.ok, found.reason) == (True, "")


HOSTILE = [
    "../kernel.py",
    "/etc/kernel.py",
    "a/../../kernel.py",
    "C:\\kernel.py",
    "..\\kernel.py",
    "~/kernel.py",
    "k\n.py",
]


@pytest.mark.parametrize("path", HOSTILE, ids=repr)
def test_a_source_path_that_leaves_the_folder_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="is no solution"):
        a_solution("    pass", path=path)


def test_a_link_in_the_folder_does_not_lead_out(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "sub").symlink_to(outside)
    with pytest.raises(UsageError, match="leaves the solution's folder"):
        write_sources(a_solution("    pass", path="sub/kernel.py"), inside)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", ".", "", "x\x1b[2J"], ids=repr)
def test_an_output_folder_is_never_left(name: str, tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    with pytest.raises(UsageError, match="is no path inside"):
        folder.write(name, "x")
    assert list(tmp_path.rglob("x*")) == []


@pytest.mark.parametrize("name", ["../..", "a/b", "..", "", "\x1b[2J", "C:\\x", "x" * 500], ids=lambda n: repr(n)[:12])
def test_a_safe_name_is_one_component(name: str) -> None:
    assert Path(safe(name)).name == safe(name)
    assert safe(name) not in ("", ".", "..")
    assert len(safe(name)) <= 120


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"spec": {"languages": ["x"], "target_hardware": ["LOCAL"], "entry_point": "kernel.py:run"}},
            "entry_point",
        ),
        (
            {"spec": {"languages": ["x"], "target_hardware": ["LOCAL"], "entry_point": "other.py::run"}},
            "entry file",
        ),
        ({"spec": {"target_hardware": ["LOCAL"], "entry_point": "kernel.py::run"}}, "languages"),
        ({"name": ""}, "name"),
        ({"sources": [{"path": "kernel.py", "content": "x"}] * 2}, "same path"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_that_is_no_solution_is_told_why(change: dict[str, Any], complaint: str) -> None:
    content = {**json.loads(a_solution("    pass").model_dump_json()), **change}
    with pytest.raises(UsageError, match=complaint):
        read_solution(json.dumps(content), "file.json")


def test_the_flashinfer_definition_has_no_computed_axes() -> None:
    found = dataset.definition_file(PROBLEM, definition_document(PROBLEM.name), "flashinfer")
    assert found["axes"]["q_out_features"] == {"type": "const", "value": 96 * 128}
    assert found["op_type"]
    assert {axis["type"] for axis in found["axes"].values()} == {"const", "var"}


def test_traces_carry_measured_times_of_published_workloads() -> None:
    other = dataclasses.replace(a_stored(SHAPES[1]), environment=an_env(kind="interpret"))
    lines = dataset.trace_lines(PROBLEM, "d", "s", [a_stored(SHAPES[0]), other])
    published = {tuple(w["axes"].values()): w["uuid"] for w in dataset.workloads(PROBLEM)}
    (line,) = lines
    assert line["workload"]["uuid"] == published[1, 128]
    assert line["evaluation"]["performance"]["latency_ms"] == pytest.approx(0.1)
    assert line["evaluation"]["environment"]["hardware"] == "NVIDIA_H200"


def test_a_workload_that_nobody_published_keeps_its_identity() -> None:
    first, second = (dataset.workload_of(PROBLEM, {"batch_size": 3, "seq_len": 7}, []) for _ in range(2))
    assert first["uuid"] == second["uuid"]
    assert first["inputs"]["rms_norm_eps"] == {"type": "scalar", "value": 1e-5}


def test_tiles_are_keyed_by_rows_under_a_name_with_the_device() -> None:
    files = tile_files([a_stored(axes) for axes in SHAPES], {"flash_attention": ("head_dim",)})
    assert list(files) == ["op=flash_attention,head_dim=128,device_name=NVIDIA_H200,dtype=bfloat16.json"]
    assert list(*(table for table in files.values())) == ["128", "2048"]


def test_tiles_of_two_cards_do_not_share_a_file() -> None:
    other = dataclasses.replace(a_stored(SHAPES[0]), environment=an_env(gpu_name="NVIDIA B200"))
    with pytest.raises(UsageError, match="more than one GPU"):
        tile_files([a_stored(SHAPES[1]), other], {"flash_attention": ()})


def test_a_hostile_device_name_stays_a_file_name() -> None:
    name = file_name("op", "", "../../etc/NVIDIA\x1b", "bfloat16")
    assert Path(name).name == name
    assert name.isprintable()


def test_export_writes_a_dataset_for_one_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the records that are shipped."""
    out = str(tmp_path / "out")
    assert cli.run(["export", "dataset", "--gpu", "NVIDIA H200", "--author", "../../x", "-o", out]) == 0
    files = sorted(path.relative_to(tmp_path).parts[1] for path in tmp_path.rglob("*.json*"))
    assert files == ["definitions", "solutions", "traces", "workloads"]
    assert "16 traces" in capsys.readouterr().err
