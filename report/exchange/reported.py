"""Results that others report, from a file of ours: validated field by field, nothing left out."""

from collections import Counter
from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from tilewright.db.rows import Trust
from tilewright.db.trust import OutsideResult
from tilewright.errors import ProblemError, UsageError
from tilewright.problem import load_problem, problem_names

Text = Annotated[str, StringConstraints(min_length=1, max_length=500)]
MOST_BYTES = 16 << 20


class Strict(BaseModel):
    """An unknown field is an error: what is not understood would be lost."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def can_be_stored(cls, value: Any) -> Any:
        if isinstance(value, str) and "\x00" in value:
            raise ValueError("a text must not hold NUL")
        return value


class ReportedRow(Strict):
    """One line of a board. Times in microseconds."""

    implementation: Text
    hardware: Text
    environment: str = ""
    workload: Text
    metric: Text
    latency_us: float = Field(gt=0)
    percent_sol: float | None = Field(default=None, gt=0, le=100)
    trust: Literal["reported"] = "reported"  # only what is measured here is measured
    license: Text | None = None
    source_url: Annotated[str, StringConstraints(pattern=r"^https?://\S+$", max_length=2000)] | None = None
    observed: str | None = None

    @field_validator("observed")
    @classmethod
    def is_a_date(cls, value: str | None) -> str | None:
        if value is not None:
            date.fromisoformat(value)
        return value


class ReportedFile(Strict):
    """What a board says of one problem, and how it measures."""

    problem: Text
    alias: Text | None = None  # the board's own name of it
    model: Text | None = None
    protocol: str = ""
    source: str = ""
    records: list[ReportedRow] = Field(min_length=1)


def read_reported(text: str, shown: str, *, problem: str | None = None) -> list[OutsideResult]:
    """The file's rows in its order, filed under `problem` where it is given; UsageError names field and value."""
    try:
        content = ReportedFile.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"{shown} holds no reported results: {_first(error)}") from error
    try:
        filed = load_problem(problem or content.problem).name
    except ProblemError as error:
        if problem is not None:
            raise
        known = f"is not known (shipped: {', '.join(problem_names())}); file it under another with --problem"
        raise UsageError(f"{shown}: problem {content.problem!r} {known}") from error
    return _rows(content, filed)


def _rows(content: ReportedFile, problem: str) -> list[OutsideResult]:
    """A board lists several numbers of one name and day, so the number is part of a row's identity."""
    seen: Counter[tuple[object, ...]] = Counter()
    rows = []
    for row in content.records:
        key = (row.implementation, row.hardware, row.environment, row.workload, row.observed, row.latency_us)
        seen[key] += 1
        rows.append(
            OutsideResult(
                problem=problem,
                implementation=row.implementation,
                hardware=row.hardware,
                environment=row.environment,
                workload=row.workload,
                latency_us=row.latency_us,
                percent_sol=row.percent_sol,
                trust=Trust.REPORTED,
                license=row.license or "",
                source_url=row.source_url or "",
                source=_joined([content.source, content.alias and f"there {content.alias}", content.model]),
                protocol=_joined([content.protocol, row.metric]),
                digest=f"{row.latency_us!r} us" + (f" #{seen[key]}" if seen[key] > 1 else ""),
                observed=row.observed or "",
            )
        )
    return rows


def _joined(parts: Sequence[str | None]) -> str:
    return "; ".join(part for part in parts if part)


def _first(error: ValidationError) -> str:
    """The first complaint with its place and the value that is there, on one line."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "file"
    value = "" if first["type"] in ("missing", "json_invalid") else f", got {str(first['input'])[:100]!r}"
    return f"{place}: {first['msg']}{value}"
