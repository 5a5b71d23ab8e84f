"""What goes into the database and comes out of it: plain values, no SQL, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from tilewright.db.environment import Environment


class Status(StrEnum):
    """How a trial ended."""

    OK = "ok"
    REJECTED = "rejected"  # a constraint or a resource limit, before the GPU saw it
    COMPILE_ERROR = "compile_error"
    OUT_OF_RESOURCES = "out_of_resources"  # shared memory, registers, device memory
    TIMEOUT = "timeout"  # compile or run limit; the reason says which
    CRASHED = "crashed"  # the process died or the device context was lost
    WRONG = "wrong"  # verification failed
    INVALID_TIME = "invalid_time"  # the timer gave NaN, None, zero, a negative or an infinite time
    ERROR = "error"  # anything else; the reason holds the message


class Level(StrEnum):
    """What a trial measured: one stage alone, or the whole block."""

    STAGE = "stage"
    PLAN = "plan"


class Verdict(StrEnum):
    """Why a record is the record."""

    BEATS_ALL = "beats_all"  # faster than the default and every baseline beyond noise
    BEATS_DEFAULT = "beats_default"  # faster than the default, not (beyond noise) than the best baseline
    DEFAULT_KEPT = "default_kept"  # nothing beat the default beyond noise
    INCUMBENT_KEPT = "incumbent_kept"
    UNMEASURED = "unmeasured"  # correct, on a device whose times are no measurements


class Trust(StrEnum):
    """How well a result is backed, least first."""

    REPORTED = "reported"  # said by others, not measured here
    MEASURED = "measured"  # measured here once
    REPRODUCED = "reproduced"  # measured again within noise on another day or another machine


@dataclass(frozen=True)
class TrialRow:
    """One candidate at one case. Times in microseconds, sizes in bytes; None where not reached."""

    case_key: str
    level: Level
    template: str  # empty for a whole plan
    label: str  # what a person reads: the template's or the plan's label
    config: Any  # JSON: the stage's values, or the plan's stages
    digest: str  # identity of template(s) and config(s)
    source_hash: str
    status: Status
    reason: str = ""
    regime: str = "graph"  # graph | eager
    compile_s: float | None = None
    gpu_s: float | None = None  # time the device was held
    median_us: float | None = None
    q1_us: float | None = None
    q3_us: float | None = None
    samples: int = 0
    error_ratio: float | None = None  # error over the eager block's error; at most 2 passes
    registers: int | None = None
    shared_memory_bytes: int | None = None
    spill_bytes: int | None = None
    noisy: str = ""  # why the measurement is doubted: throttle, contention
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempt: int = 1  # 2 for the repetition of a noisy trial within the same run


@dataclass(frozen=True)
class RecordRow:
    """The active plan of a case in an environment, with the paired evidence that made it so."""

    case_key: str
    plan: list[dict[str, Any]]
    digest: str
    source_hash: str
    verdict: Verdict
    regime: str = "graph"
    weight_mode: str = "separate"
    median_us: float | None = None  # None where times are no measurements
    low_us: float | None = None  # 95 % interval of the median
    high_us: float | None = None
    default_us: float | None = None
    baseline: str = ""  # name of the best baseline in the same final
    baseline_us: float | None = None
    floor_us: float | None = None  # speed of light
    deterministic: bool = True
    evidence: dict[str, Any] = field(default_factory=dict)  # every finalist: label, medians, paired intervals, rounds
    created_at: datetime | None = None


@dataclass(frozen=True)
class RunRow:
    """One invocation of the tuner."""

    command: str
    seed: int
    effort: str
    tool_version: str
    protocol: str


class RunStatus(StrEnum):
    """How a run ended, if it did."""

    RUNNING = "running"
    DONE = "done"
    INTERRUPTED = "interrupted"  # by a signal, or found dead by the next run
    FAILED = "failed"


@dataclass(frozen=True)
class StoredRecord:
    """A record with what it belongs to; `invalid` says why its content cannot be used (it is empty for a sound one)."""

    record: RecordRow
    environment: Environment
    problem: str
    case_name: str
    axes: Mapping[str, int]  # the variable axes
    id: int | None = None  # None where the record comes from a JSON file
    run_id: int | None = None
    active: bool = True
    quarantine_reason: str = ""
    invalid: str = ""
    trust: Trust = Trust.MEASURED


@dataclass(frozen=True)
class StoredTrial:
    """A trial with what it belongs to; `invalid` as in StoredRecord."""

    id: int
    run_id: int
    trial: TrialRow
    environment: Environment
    problem: str
    case_name: str
    invalid: str = ""


@dataclass(frozen=True)
class StoredRun:
    """A run with its outcome."""

    id: int
    run: RunRow
    environment: Environment
    status: RunStatus
    note: str
    pid: int
    host: str
    started_at: datetime
    finished_at: datetime | None
    trials: int
