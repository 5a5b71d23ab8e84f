"""Counting shapes without a record of their own, and tuning the file that comes of it."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import SMOKE, a_case, arguments
from served import a_record

from tilewright import cli
from tilewright.errors import UsageError
from tilewright.problem import WorkloadCase, load_problem
from tilewright.runtime import dispatch, trace
from tilewright.runtime.machine import machine_of
from tilewright.search.run import TuneRequest
from tilewright.wanted import SCHEMA, entry_of, merged, read_wanted

Serve = Callable[..., None]
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = load_problem()


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "wanted.json"
    monkeypatch.setenv("TILEWRIGHT_TRACE", str(path))
    monkeypatch.setattr(trace, "_traces", {})
    return path


def counts(path: Path) -> dict[str, int]:
    trace.flush()
    return {entry["case"]: entry["calls"] for entry in json.loads(path.read_text())["shapes"]}


def written(path: Path, *shapes: tuple[WorkloadCase, int]) -> str:
    entries = [entry_of(case, "default", calls) for case, calls in shapes]  # in this order, as an edited file may be
    path.write_text(json.dumps({"schema": SCHEMA, "shapes": entries}))
    return str(path)


def test_calls_are_counted_by_shape_and_written_most_used_first(traced: Path) -> None:
    for seq_len, calls in ((5, 2), (7, 4)):
        for _ in range(calls):
            dispatch(**arguments(a_case(1, seq_len)))
    found = counts(traced)
    assert list(found.items()) == [("b1s7", 4), ("b1s5", 2)]


def test_counts_are_added_to_those_of_earlier_flushes(traced: Path) -> None:
    for calls in (1, 2):
        dispatch(**arguments(a_case(1, 5)))
        assert counts(traced) == {"b1s5": calls}


def test_a_shape_with_a_record_of_its_own_is_not_wanted(serve: Serve, traced: Path) -> None:
    serve(a_record(a_case(1, 8), environment=machine_of("interpret").environment))
    for seq_len in (8, 9):
        dispatch(**arguments(a_case(1, seq_len)))
    assert counts(traced) == {"b1s9": 1}


def test_threads_lose_no_call(traced: Path) -> None:
    given = arguments(a_case(1, 5))
    dispatch(**given)
    threads = [threading.Thread(target=lambda: [dispatch(**given) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(traced) == {"b1s5": 81}


def test_nothing_is_counted_unless_asked(tmp_path: Path) -> None:
    dispatch(**arguments(a_case(1, 5)))
    trace.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "_traces", {})
    monkeypatch.setenv("TILEWRIGHT_TRACE", str(tmp_path))
    dispatch(**arguments(a_case(1, 5)))
    for _ in range(2):
        trace.flush()
    assert caplog.text.count("cannot be added to") == 1


def test_counts_are_written_when_the_process_ends(traced: Path) -> None:
    code = (
        "from tilewright.problem import load_problem; from tilewright.runtime.trace import counter_for\n"
        "counter_for(load_problem().case(batch_size=3, seq_len=77), 'default').calls += 5"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert counts(traced) == {"b3s77": 5}


def test_counts_are_written_while_the_process_lives(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "FLUSH_EVERY_S", 0.02)
    dispatch(**arguments(a_case(1, 5)))
    deadline = time.monotonic() + 20
    while not traced.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert traced.exists()


def test_shapes_beyond_a_limit_are_served_uncounted_with_a_warning(
    traced: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "MOST_SHAPES", 1)
    for seq_len in (5, 6, 7):
        dispatch(**arguments(a_case(1, seq_len)))
    assert counts(traced) == {"b1s5": 1}
    assert caplog.text.count("further ones are not") == 1


def test_a_forked_child_writes_its_own_calls_alone(traced: Path) -> None:
    counter = trace.counter_for(PUBLISHED.parse_case("b3s77"), "default")
    assert counter is not None
    counter.calls += 5
    found = trace._traces[traced]
    found.start_anew()  # what the fork handler calls in the child
    counter.calls += 2
    assert counts(traced) == {"b3s77": 2}


def test_tuning_takes_wanted_shapes_most_used_first_also_such_as_no_suite_has(tmp_path: Path) -> None:
    shapes = [(SMOKE.case(batch_size=1, seq_len=13, weight_mode="packed"), 4), (SMOKE.parse_case("b3s11"), 9)]
    request = TuneRequest(PUBLISHED.name, device="interpret", wanted=written(tmp_path / "w", *shapes))
    assert [case.key for case in request.select().cases] == [shapes[1][0].key, shapes[0][0].key]


def test_shapes_of_other_variants_are_found_among_the_shipped_problems(tmp_path: Path) -> None:
    cases = [
        load_problem("glm_4_5_air_attention").parse_case("b2s100"),
        PUBLISHED.with_dtype("float16").parse_case("b2s100"),
        PUBLISHED.with_constants(num_attention_heads=48).parse_case("b2s100"),
    ]
    wanted = read_wanted(written(tmp_path / "w", *((case, 1) for case in cases)), PUBLISHED)
    assert {case.key for case in wanted.cases} == {case.key for case in cases}


def test_a_shape_of_no_known_problem_is_named_and_left_out(tmp_path: Path) -> None:
    entry = {**entry_of(a_case(), "default", 3), "key": "another|key"}
    path = tmp_path / "w"
    path.write_text(json.dumps({"schema": SCHEMA, **merged(None, [entry, entry_of(a_case(1, 5), "default", 1)])}))
    selection = TuneRequest(PUBLISHED.name, device="interpret", wanted=str(path)).select()
    assert [case.name for case in selection.cases] == ["b1s5"]
    assert "b2s9 (bfloat16, 3 calls)" in selection.notes[0]


GOOD = entry_of(a_case(), "default", 3)
BAD: list[tuple[Any, str]] = [
    ("{", "cannot be read"),
    ("[]", "no file of wanted shapes"),
    ({"schema": "other", "shapes": []}, "no file of wanted shapes"),
    ({"schema": SCHEMA, "shapes": []}, "names no shape"),
    ({"schema": SCHEMA, "shapes": [{"case": "b1s5"}]}, "shape 0 is malformed: KeyError"),
    ({"schema": SCHEMA, "shapes": [{**GOOD, "calls": "many"}]}, "calls must be int, got 'many'"),
    ({"schema": SCHEMA, "shapes": [{**GOOD, "key": "a|b|bfloat16|x|c|separate|y=z"}]}, "holds no shape of"),
    ({"schema": SCHEMA, "shapes": [{**GOOD, "key": "another"}]}, "holds no shape of"),
    (
        {"schema": SCHEMA, "shapes": [entry_of(PUBLISHED.parse_case("b4s512"), "default", 1)]},
        "take the interpreter days",
    ),
]


@pytest.mark.parametrize(("content", "complaint"), BAD, ids=[complaint for _, complaint in BAD])
def test_a_bad_file_is_a_clear_error(
    tmp_path: Path, content: Any, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wanted.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert cli.run(["tune", "--wanted", str(path), "--device", "interpret"]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert str(path) in said


def test_wanted_and_case_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="leave out --case"):
        TuneRequest(PUBLISHED.name, cases=["b1s5"], wanted="file").select()


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"wanted nowhere\.json cannot be read"):
        TuneRequest(PUBLISHED.name, device="interpret", wanted="nowhere.json").select()
