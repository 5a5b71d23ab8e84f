"""A recording answers as the device did, on any machine, and says what it cannot answer."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from recorded import GPU_S, tune_into, use_toys
from toys import EFFORT, FAMILY, FormulaDevice, MemoryStore, a_case, a_context

from tilewright import cli
from tilewright.db.reader import Reader
from tilewright.db.rows import Level, Status
from tilewright.errors import NothingFound, UsageError
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.search.context import quartiles
from tilewright.search.outcome import Candidate, MeasureOptions, TrialOutcome
from tilewright.search.record_run import RecordRequest, export_recording
from tilewright.search.recording import Recording, read_recording, write_recording
from tilewright.search.replay import ReplayDevice, _samples
from tilewright.search.tune import Budget, Tuner

PROBLEM = "gqa_attention_with_qk_norm"


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_toys(monkeypatch)
    return tmp_path / "tuned.sqlite"


def recorded(database: Path, *names: str) -> Recording:
    return export_recording(RecordRequest(PROBLEM, names or ("b4s512",), db=str(database))).recording


def replayed(recording: Recording, budget: Budget = Budget()) -> tuple[MemoryStore, ReplayDevice]:
    device, store = ReplayDevice(recording), MemoryStore()
    context = device.adapt(a_context(FormulaDevice(), store))
    Tuner(context, store).run([one.case for one in recording.cases], budget)
    return store, device


def test_replay_finds_the_winner_that_the_device_found(database: Path) -> None:
    results = tune_into(database, ["b4s512", "b1s128"])
    store, _ = replayed(recorded(database, "b4s512", "b1s128"))
    for result in results:
        assert result.record is not None
        again = store.records[result.case.key]
        assert again.digest == result.record.digest
        assert again.verdict is result.record.verdict
        assert again.median_us == pytest.approx(result.record.median_us, rel=1e-4)  # ratios are stored with four digits
        assert again.baseline == "library"


def test_recorded_times_and_failures_come_back_as_they_were(database: Path) -> None:
    def fault(candidate: Candidate) -> TrialOutcome | None:
        if isinstance(candidate, Stage) and candidate.template == "attention" and candidate.values["TILE"] == 128:
            return TrialOutcome(Status.WRONG, "injected")
        return None

    tune_into(database, device=FormulaDevice(fault))
    store, _ = replayed(recorded(database))
    with Reader.open(database) as reader:
        then = {(row.trial.level, row.trial.digest): row.trial for row in reader.trials()}
    for row in store.trials:
        before = then[row.level, row.digest]
        assert (row.status, row.reason, row.median_us) == (before.status, before.reason, before.median_us)
    assert any(row.reason == "injected" for row in store.trials)


def test_time_of_a_replay_is_the_recorded_device_time(database: Path) -> None:
    tune_into(database)
    recording = recorded(database)
    store, device = replayed(recording)
    assert device.gpu_s == pytest.approx(GPU_S * len(store.trials))
    store, _ = replayed(recording, Budget(seconds=4 * GPU_S))
    assert len(store.trials) == 4


def test_what_was_not_recorded_is_said_to_be_so(database: Path) -> None:
    tune_into(database)
    device = ReplayDevice(recorded(database))
    stage = Stage("attention", {"TILE": 7, "WARPS": 4})
    for candidate in (stage, FusionPlan((stage,))):
        outcome = device.evaluate(a_case(), candidate, MeasureOptions(), run_limit_s=1)
        assert (outcome.status, outcome.reason) == (Status.ERROR, "not recorded")


def test_recording_outlives_its_templates_sources(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune_into(database)
    recording = recorded(database)
    old = {name: replace(part, source_hash="of another day") for name, part in recording.parts.items()}
    store, _ = replayed(replace(recording, parts=old))
    assert store.records[a_case().key].digest == replayed(recording)[0].records[a_case().key].digest


def test_only_the_latest_sources_are_recorded(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune_into(database)
    template = type(FAMILY.registry["attention"])
    monkeypatch.setattr(template, "source_hash", property(lambda self: "new" if self.name == "attention" else "old"))
    tune_into(database, effort=replace(EFFORT, stage_trials=3))
    recording = recorded(database)
    assert {row.source_hash for row in recording.cases[0].stages("attention")} == {"new"}
    assert len(recording.cases[0].stages("attention")) == 3


def test_recording_says_how_much_of_the_space_it_holds(database: Path) -> None:
    tune_into(database, effort=replace(EFFORT, stage_trials=4))
    [one] = recorded(database).cases
    assert (one.coverage["attention"].recorded, one.coverage["attention"].valid) == (4, 11)
    assert one.coverage["attention"].how == "chosen by a search"
    tune_into(database)
    [one] = recorded(database).cases
    assert one.coverage["attention"].how == "every valid config"


def test_file_is_compact_stable_and_reads_back_equal(database: Path, tmp_path: Path) -> None:
    tune_into(database)
    recording = recorded(database)
    first, second = tmp_path / "a.rec.gz", tmp_path / "b.rec.gz"
    write_recording(recording, first)
    again = read_recording(first)
    write_recording(again, second)
    assert first.read_bytes() == second.read_bytes()
    assert [row.digest for row in again.cases[0].trials] == [row.digest for row in recording.cases[0].trials]
    assert again.environment == recording.environment
    assert first.stat().st_size < 100 * len(recording.cases[0].trials)


def _cut(packed: bytes) -> bytes:
    return packed[: len(packed) // 2]


def _flip(packed: bytes) -> bytes:
    return packed[:40] + bytes([packed[40] ^ 255]) + packed[41:]


def _edited(change: Callable[[list[dict[str, object]]], object]) -> Callable[[bytes], bytes]:
    def edit(packed: bytes) -> bytes:
        lines = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
        change(lines)
        return gzip.compress("\n".join(map(json.dumps, lines)).encode())

    return edit


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_cut, "is damaged"),
        (_flip, "is damaged"),
        (_edited(lambda lines: lines.pop()), "is damaged: its end is missing"),
        (_edited(lambda lines: lines[2].update(trial={"level": "stage"})), "is damaged"),
        (_edited(lambda lines: lines[0].update(version=2)), "has version 2, this version knows up to 1"),
        (_edited(lambda lines: lines[0].update(format="other")), "is no recording"),
        (_edited(lambda lines: lines[1].update(key="other")), "is of another definition"),
        (_edited(lambda lines: lines[0].update(constants={"wheels": 4})), "is of another definition"),
        (lambda packed: b"SQLite format 3\0", "is no recording"),
        (lambda packed: b"", "is no recording"),
    ],
)
def test_unusable_file_is_one_clear_error(
    damage: Callable[[bytes], bytes], complaint: str, database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune_into(database)
    file = database.with_name("x.rec.gz")
    write_recording(recorded(database), file)
    file.write_bytes(damage(file.read_bytes()))
    assert cli.run(["tune", "--device", f"replay:{file}", "--db", str(database)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(file) in line
    assert complaint in line


def test_commands_record_and_replay(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [result] = tune_into(database)
    assert result.record is not None
    file, other = database.with_name("x.rec.gz"), database.with_name("replayed.sqlite")
    assert cli.run(["record", "--case", "b4s512", "-o", str(file), "--db", str(database)]) == 0
    tune = ["tune", "--device", f"replay:{file}", "--db", str(other), "--json"]
    assert cli.run(tune) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["environment"]["kind"] == "replay"
    assert report["cases"][0]["record"]["plan"] == result.record.plan
    assert cli.run([*tune, "--case", "b1s128"]) == 2
    assert "case b1s128 is not in the recording, which holds b4s512" in capsys.readouterr().err
    assert cli.run([*tune, "--suite", "full"]) == 2
    assert "--suite cannot be used with --device replay" in capsys.readouterr().err


def test_replays_are_never_recorded_as_measurements(database: Path) -> None:
    tune_into(database)
    file, other = database.with_name("x.rec.gz"), database.with_name("replayed.sqlite")
    write_recording(recorded(database), file)
    assert cli.run(["tune", "--device", f"replay:{file}", "--db", str(other)]) == 0
    with pytest.raises(NothingFound, match="no trial of b4s512"):
        recorded(other)


def test_unwritable_output_is_told(database: Path) -> None:
    tune_into(database)
    with pytest.raises(UsageError, match="cannot be written"):
        write_recording(recorded(database), database / "below" / "x.gz")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 10, 16, 30, 50])
def test_rebuilt_samples_have_the_stored_median_and_quartiles(count: int, database: Path) -> None:
    tune_into(database)
    row = next(row for row in recorded(database).cases[0].trials if row.level is Level.STAGE)
    row = replace(row, median_us=10.0, q1_us=9.0, q3_us=12.0, samples=count)
    samples = _samples(row)
    assert len(samples) == count
    assert median(samples) == 10.0
    if count >= 5:
        assert quartiles(samples) == pytest.approx((9.0, 12.0))
