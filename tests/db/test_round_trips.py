"""Whatever a row holds comes back, from SQLite and from JSON."""

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from db_factories import a_case, a_record, a_run, an_env, fill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.db import records_json
from tilewright.db.environment import Environment
from tilewright.db.mapping import from_json_text, to_json_text
from tilewright.db.reader import Reader
from tilewright.db.rows import Level, RecordRow, Status, StoredRecord, TrialRow, Verdict
from tilewright.db.store import Store
from tilewright.errors import DamagedDatabase, DatabaseError, MissingDatabase, SchemaTooNew

texts = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
integers = st.none() | st.integers(0, 2**31 - 1)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
times = st.datetimes(
    datetime(1970, 1, 2), datetime(2100, 1, 1), timezones=st.sampled_from([UTC, timezone(timedelta(hours=-5))])
)
environments = st.builds(
    Environment,
    kind=st.sampled_from(["cuda", "interpret", "replay"]),
    gpu_name=texts,
    sm_count=st.integers(0, 1000),
    memory_bytes=st.integers(0, 2**50),
    capability=texts,
    triton=texts,
    mig=texts,
    torch=texts,
    sm_clock_mhz=integers,
    power_limit_w=numbers,
    peak_flops_per_s=numbers,
)
trials = st.builds(
    TrialRow,
    case_key=st.just(a_case().key),
    level=st.sampled_from(Level),
    template=texts,
    label=texts,
    config=json_values,
    digest=texts,
    source_hash=texts,
    status=st.sampled_from(Status),
    reason=texts,
    regime=st.sampled_from(["graph", "eager"]),
    compile_s=numbers,
    gpu_s=numbers,
    median_us=numbers,
    q1_us=numbers,
    q3_us=numbers,
    samples=st.integers(0, 10**6),
    error_ratio=numbers,
    registers=integers,
    shared_memory_bytes=integers,
    spill_bytes=integers,
    noisy=texts,
    started_at=st.none() | times,
    finished_at=times,
    attempt=st.integers(1, 3),
)
records = st.builds(
    RecordRow,
    case_key=st.just(a_case().key),
    plan=st.lists(
        st.fixed_dictionaries({"template": texts, "values": st.dictionaries(texts, scalars, max_size=3)}), max_size=3
    ),
    digest=texts,
    source_hash=texts,
    verdict=st.sampled_from(Verdict),
    regime=st.sampled_from(["graph", "eager"]),
    median_us=numbers,
    low_us=numbers,
    high_us=numbers,
    default_us=numbers,
    baseline=texts,
    baseline_us=numbers,
    floor_us=numbers,
    deterministic=st.booleans(),
    evidence=st.dictionaries(texts, json_values, max_size=3),
    created_at=times,
)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuned.sqlite") as opened:
        yield opened


@quick
@given(trial=trials, env=environments)
def test_any_trial_survives_the_database(store: Store, trial: TrialRow, env: Environment) -> None:
    run = store.begin_run(a_run(), env)
    store.add_trial(run, a_case(), env, trial)
    assert store.trials(run_id=run) == [trial]


@quick
@given(record=records, env=environments)
def test_any_record_survives_the_database(store: Store, record: RecordRow, env: Environment) -> None:
    run = store.begin_run(a_run(), env)
    store.activate(run, a_case(), env, record)
    stored = store.active_record(a_case(), env, record.regime)
    assert stored is not None
    assert (stored.record, stored.environment.digest, stored.invalid) == (record, env.digest, "")
    assert (stored.case_name, stored.problem, stored.axes) == ("b4s512", a_case().problem.name, a_case().shape_axes)


@quick
@given(record=records, env=environments)
def test_any_record_survives_json(record: RecordRow, env: Environment) -> None:
    stored = StoredRecord(record, env, "problem", "b4s512", {"batch_size": 4, "seq_len": 512})
    assert records_json.loads(records_json.dumps([stored, stored])) == [stored, stored]


@given(st.dictionaries(texts, scalars, max_size=5), st.randoms(use_true_random=False))
def test_json_text_does_not_depend_on_the_order_of_keys(config: dict[str, Any], chance: Any) -> None:
    keys = list(config)
    chance.shuffle(keys)
    assert to_json_text({key: config[key] for key in keys}) == to_json_text(config)
    assert from_json_text(to_json_text(config)) == config


@given(environments, st.randoms(use_true_random=False))
def test_an_environments_digest_does_not_depend_on_the_order_of_its_fields(env: Environment, chance: Any) -> None:
    values = [(f.name, getattr(env, f.name)) for f in dataclasses.fields(env)]
    chance.shuffle(values)
    assert Environment(**dict(values)).digest == env.digest


def test_records_of_a_database_can_be_shipped_as_json(tmp_path: Path) -> None:
    fill(tmp_path / "tuned.sqlite")
    with Reader.open(tmp_path / "tuned.sqlite") as reader:
        found = reader.active_records()
    records_json.write_records(tmp_path / "records.json", found)
    assert [file.name for file in tmp_path.glob("*records*")] == ["records.json"]
    assert records_json.read_records(tmp_path / "records.json") == [
        dataclasses.replace(stored, id=None, run_id=None) for stored in found
    ]


def test_single_rounds_stay_out_of_the_json(tmp_path: Path) -> None:
    record = a_record(evidence={"rounds": {"plan": [1.0] * 100}, "median": [1.0, float("nan")]})
    (read,) = records_json.loads(records_json.dumps([StoredRecord(record, an_env(), "p", "b4s512", {})]))
    assert read.record.evidence == {"rounds": {}, "median": [1.0, None]}


def test_records_that_cannot_be_used_are_not_shipped(tmp_path: Path) -> None:
    broken = StoredRecord(a_record(), an_env(), "p", "b4s512", {}, invalid="plan is not JSON")
    records_json.write_records(tmp_path / "records.json", [broken])
    assert records_json.read_records(tmp_path / "records.json") == []


@pytest.mark.parametrize(
    ("text", "kind", "match"),
    [
        ("{", DamagedDatabase, "is not JSON"),
        ("[]", DamagedDatabase, "no schema number"),
        ('{"schema": 1}', DamagedDatabase, "no list"),
        ('{"schema": 2, "records": 7}', SchemaTooNew, "upgrade tilewright"),
        ('{"schema": 1, "records": [7]}', DamagedDatabase, "record 0 is malformed"),
        ('{"schema": 1, "records": [{}]}', DamagedDatabase, "record 0 is malformed.*case_key"),
    ],
)
def test_a_faulty_file_of_records_is_explained(text: str, kind: type[DatabaseError], match: str) -> None:
    with pytest.raises(kind, match=match):
        records_json.loads(text)


@given(st.data())
def test_a_file_of_records_cut_anywhere_raises_nothing_else(data: st.DataObject) -> None:
    text = records_json.dumps([StoredRecord(a_record(), an_env(), "p", "b4s512", {"batch_size": 4})]).rstrip()
    with pytest.raises(DatabaseError):
        records_json.loads(text[: data.draw(st.integers(0, len(text) - 1))])


def test_missing_records_are_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingDatabase, match=r"no records at .*none\.json"):
        records_json.read_records(tmp_path / "none.json")
