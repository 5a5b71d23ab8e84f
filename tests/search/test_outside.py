"""`import solution`: verified first, never trusted, and whatever it does costs itself alone."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from db_factories import an_env
from toys import LIMITS

from tilewright import cli
from tilewright.db.reader import Reader
from tilewright.db.rows import RecordRow, Status, StoredRecord, Trust, Verdict
from tilewright.db.trust import outside_results
from tilewright.problem import Ceilings, load_problem
from tilewright.report.exchange.checking import write_sources
from tilewright.report.exchange.incoming import digest_of, problem_of
from tilewright.report.exchange.schema import Solution, read_solution
from tilewright.search import outside
from tilewright.search.describe import Described
from tilewright.search.outcome import TrialOutcome
from tilewright.search.outside import HOOKS, OutsideCode, OutsideReport, measure_code
from tilewright.search.request import Selection
from tilewright.search.session import DeviceSession, Strict

PROBLEM = load_problem()
SMALL = PROBLEM.at_suite("smoke")
CASE = SMALL.case(batch_size=1, seq_len=16)
NAMES = ", ".join(spec.name for spec in PROBLEM.inputs)
ANSWER = f"reference({NAMES})"


def a_document(body: str, *, writes: bool = True, head: str = "", **changes: Any) -> dict[str, Any]:
    taken = f"{NAMES}, output" if writes else NAMES
    text = PROBLEM.reference.replace("def run(", "def reference(") + f"\n{head}\ndef run({taken}):\n{body}\n"
    return {
        "name": "theirs", "definition": PROBLEM.name, "author": "an author",
        "spec": {"languages": ["pytorch"], "target_hardware": ["LOCAL"], "entry_point": "kernel.py::run",
                 "destination_passing_style": writes},
        "sources": [{"path": "kernel.py", "content": text}], **changes,
    }  # fmt: skip


def in_folder(document: dict[str, Any], folder: Path) -> OutsideCode:
    solution: Solution = read_solution(json.dumps(document), "here")
    write_sources(solution, folder)
    return OutsideCode(
        solution.name, solution.author, folder, solution.entry_file, solution.entry_function,
        solution.spec.destination_passing_style, digest_of(solution),
    )  # fmt: skip


@pytest.fixture(scope="module")
def session() -> Iterator[DeviceSession]:
    with DeviceSession("interpret", hooks=HOOKS) as opened:
        yield opened


def measured(code: OutsideCode, session: Any, *cases: Any) -> OutsideReport:
    selection = Selection(PROBLEM, "smoke", cases or (CASE,), "interpret")
    return measure_code(code, selection, session, regime="graph", says=lambda answer: None)


GLOBAL = "CALLS = []"


@pytest.mark.parametrize(
    ("document", "status", "reason"),
    [
        (a_document(f"    output.copy_({ANSWER})"), Status.OK, ""),
        (a_document(f"    return {ANSWER}", writes=False), Status.OK, ""),
        (a_document("    pass"), Status.WRONG, "not finite"),
        (a_document(f"    output.copy_(1.05 * {ANSWER})"), Status.WRONG, "error"),
        (
            a_document(f"    q_norm_weight = q_norm_weight * 0 + 1\n    output.copy_({ANSWER})"),
            Status.WRONG,
            "drawn norm weights",
        ),
        (a_document(f"    output.copy_({ANSWER})\n    q_norm_weight.fill_(1)"), Status.WRONG, "changes its input"),
        (
            a_document(f"    CALLS or CALLS.append({ANSWER})\n    output.copy_(CALLS[0])", head=GLOBAL),
            Status.WRONG,
            "second call",
        ),
        (a_document(f"    return {ANSWER}.float()", writes=False), Status.ERROR, "returns torch.float32"),
        (a_document("    return ()", writes=False), Status.ERROR, "returns 0 tensors, not 1"),
        (a_document("    import not_there"), Status.ERROR, "No module named 'not_there'"),
        (a_document("    pass", head="raise RuntimeError('at import')"), Status.ERROR, "at import"),
        (a_document("    import os\n    os.abort()"), Status.CRASHED, "signal 6"),
        (a_document("    import os\n    os._exit(0)"), Status.CRASHED, "exit code 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_solution_is_what_it_does(
    document: dict[str, Any], status: Status, reason: str, tmp_path: Path, session: DeviceSession
) -> None:
    report = measured(in_folder(document, tmp_path), session)
    assert report.cases[0].status is status
    assert reason in report.cases[0].reason
    assert report.rows == ()  # the interpreter's times are none


def test_one_that_hangs_is_ended_and_the_next_is_measured(
    tmp_path: Path, session: DeviceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "COMPILE_LIMIT_S", 2.0)
    first, second = tmp_path / "a", tmp_path / "b"
    hung = measured(
        in_folder(a_document("    while True: pass"), first), session, CASE, SMALL.case(batch_size=1, seq_len=7)
    )
    assert [answer.status for answer in hung.cases] == [Status.TIMEOUT]  # the second case is not tried
    monkeypatch.undo()
    assert measured(in_folder(a_document(f"    output.copy_({ANSWER})"), second), session).right


def test_what_it_prints_reaches_no_terminal(
    tmp_path: Path, session: DeviceSession, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"    import os\n    os.write(2, b'\\x1b]0;owned')\n    print('owned')\n    output.copy_({ANSWER})"
    assert measured(in_folder(a_document(body), tmp_path), session).right
    assert "owned" not in "".join(capfd.readouterr())


class TimedDevice:
    """Right everywhere, at this share of the speed of light."""

    def __init__(self, share: float, noisy: str = "", strict: Strict = Strict(Status.OK)) -> None:
        self._share, self._noisy, self._strict = share, noisy, strict
        self._ceilings = Ceilings(790e12, 4.3e12)

    def describe(self) -> Described:
        return Described(an_env(), LIMITS, self._ceilings)

    def evaluate(self, case: Any, candidate: Any, options: Any, **limits: float) -> TrialOutcome:
        us = case.floor_us(self._ceilings) / self._share
        return TrialOutcome(Status.OK, samples_us=(us, 0.99 * us, 5 * us), error_ratio=1.0, noisy=self._noisy)

    def verify_strict(self, case: Any, plan: Any) -> Strict:
        return self._strict


@pytest.fixture
def code(tmp_path: Path) -> OutsideCode:
    return in_folder(a_document("    pass"), tmp_path)


def test_a_whole_suite_gives_its_cases_and_its_mean(code: OutsideCode) -> None:
    cases = PROBLEM.suite("full")
    report = measured(code, TimedDevice(0.5), *cases)
    rows = {row.workload: row for row in report.rows}
    assert set(rows) == {*(case.name for case in cases), "suite of 16 cases"}
    total = rows.pop("suite of 16 cases")
    assert total.latency_us == pytest.approx(sum(row.latency_us for row in rows.values()) / 16)
    assert total.percent_sol == pytest.approx(50)
    assert total.trust is Trust.MEASURED
    assert (total.hardware, total.environment) == ("NVIDIA H200", "Triton 3.6.0, graph")
    assert total.digest


def test_a_part_of_a_suite_has_no_mean(code: OutsideCode) -> None:
    assert [row.workload for row in measured(code, TimedDevice(0.5), PROBLEM.suite("full")[0]).rows] == ["b1s128"]


@pytest.mark.parametrize(
    ("device", "status"),
    [
        (TimedDevice(1.2), Status.INVALID_TIME),
        (TimedDevice(0.5, strict=Strict(Status.WRONG, "seed 3")), Status.WRONG),
    ],
)
def test_too_fast_or_wrong_in_the_strict_check_is_rejected(
    device: TimedDevice, status: Status, code: OutsideCode
) -> None:
    report = measured(code, device, *PROBLEM.suite("full"))
    assert [answer.status for answer in report.cases] == [status]
    assert report.rows == ()


def test_what_disturbed_the_times_stays_with_them(code: OutsideCode) -> None:
    report = measured(code, TimedDevice(0.5, noisy="power brake"), *PROBLEM.suite("full"))
    assert all("noisy: power brake" in row.protocol for row in report.rows)


def run(document: Any, folder: Path, *words: str) -> int:
    file = folder / "solution.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return cli.run(["import", "solution", str(file), "--db", str(folder / "t.sqlite"), *words])


HERE = ("--device", "interpret", "--case", "b1s16")


def test_what_export_solution_writes_is_right_when_it_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default plan of Triton templates, interpreted."""
    from tilewright.kernel_templates.families import load_family
    from tilewright.report.exchange.solution import export_solution, limits_of

    env = an_env(kind="interpret", gpu_name="Triton interpreter", capability="0.0")
    row = RecordRow(CASE.key, [], "d" * 16, "s", Verdict.UNMEASURED)
    bare = StoredRecord(row, env, PROBLEM.name, CASE.name, CASE.shape_axes)
    plan = load_family(PROBLEM.family).registry.default_plan(CASE, limits_of(bare), kinds=("triton",))
    stored = dataclasses.replace(bare, record=dataclasses.replace(row, plan=plan.to_json()))
    made = export_solution(SMALL, [stored], author="tilewright")
    assert "attention_kernel" in made.source
    assert run(made.content, tmp_path, *HERE, "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["cases"][0]["error_ratio"] <= 2
    assert "nothing is stored" in told.err
    assert not (tmp_path / "t.sqlite").exists()


def test_the_command_stores_what_was_timed_and_ranks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose times are given."""

    class Given(TimedDevice):
        def __init__(self, device: str, hooks: Any) -> None:
            super().__init__(0.5)

        def __enter__(self) -> "Given":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("tilewright.search.session.DeviceSession", Given)
    monkeypatch.setattr("tilewright.search.request.resolve_device", lambda text: "cuda:0")
    for _ in range(2):
        assert run(a_document("    pass", name="=evil\x1b[2J"), tmp_path, "--suite", "full") == 0
    with Reader.open(tmp_path / "t.sqlite") as reader:
        assert len(reader.ask(outside_results)) == 17
    capsys.readouterr()
    assert cli.run(["results", "leaderboard", "--db", str(tmp_path / "t.sqlite"), "--gpu", "NVIDIA H200"]) == 0
    text = capsys.readouterr().out
    assert {line.split()[-1] for line in text.splitlines() if " measured " in line} == {"=evil\ufffd[2J", "tilewright"}


def test_a_wrong_one_is_rejected_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "    raise RuntimeError('\\x1b[2Jowned')"
    assert run(a_document(body), tmp_path, *HERE) == 1
    told = capsys.readouterr().err
    assert "b1s16: error, RuntimeError" in told
    assert "rejected: nothing is stored" in told
    assert "\x1b" not in told
    assert not (tmp_path / "t.sqlite").exists()


@pytest.mark.parametrize("path", ["../outside_was_here.py", "/tmp/outside_was_here.py", "a/../../outside_was_here.py"])
def test_a_path_that_leaves_the_folder_is_refused(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = a_document("    pass")
    document["sources"].append({"path": path, "content": "x = 1"})
    assert run(document, tmp_path, *HERE) == 2
    assert "leaves the solution's folder" in capsys.readouterr().err
    assert not list(tmp_path.parent.glob("outside_was_here.py"))


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (a_document("    pass", definition="another_kernel"), "definition 'another_kernel' is no shipped problem"),
        (a_document("    import threading"), "kernel.py imports threading"),
        (a_document("    from tilewright.search import verify"), "kernel.py imports tilewright.search"),
        (a_document("    torch.cuda.Stream()"), "kernel.py calls Stream"),
        (a_document("    this is no python"), "kernel.py is no Python"),
        (
            a_document(
                "    pass", spec={"languages": ["cuda"], "target_hardware": ["LOCAL"], "entry_point": "kernel.py::run"}
            ),
            "languages cuda cannot be measured here; accepted: python, pytorch, triton",
        ),
        (a_document("    pass", name="a\x00b"), "name must have"),
        ([], "is no solution"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_measured_is_refused_before_it_runs(
    document: Any, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(document, tmp_path, *HERE) == 2
    assert complaint in capsys.readouterr().err


def test_a_boards_number_before_the_name_is_understood() -> None:
    assert problem_of(f"092_{PROBLEM.name}") == PROBLEM.name
