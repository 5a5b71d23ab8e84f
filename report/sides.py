"""What `results compare` was asked to compare: a run, a file, or an environment."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tilewright.db.environment import normalised_gpu_name
from tilewright.errors import NothingFound, UsageError
from tilewright.report.compare import Side
from tilewright.report.queries import Sourced
from tilewright.report.sources import DATABASE, gather

RUN = "run:"


def side(text: str, records: Sequence[Sourced], narrowed: Callable[[Sequence[Sourced]], list[Sourced]]) -> Side:
    """`records` is the whole history of the own database and what is shipped; a file is read by itself."""
    if text.startswith(RUN):
        return Side(text, [s.stored for s in _of_run(text, records)])
    if "://" in text or Path(text).is_file():
        return Side(text, [s.stored for s in _some(text, narrowed(gather(text, shipped=False)))])
    name = normalised_gpu_name(text)
    found = [
        sourced
        for sourced in records
        if sourced.stored.active
        and (sourced.stored.environment.gpu_name == name or sourced.stored.environment.digest.startswith(text))
    ]
    return Side(text, [s.stored for s in _some(text, found)])


def _of_run(text: str, records: Sequence[Sourced]) -> list[Sourced]:
    number = text.removeprefix(RUN)
    if not number.isdecimal():
        raise UsageError(f"a run is written run:N, got {text!r}")
    return _some(text, [s for s in records if s.source == DATABASE and s.stored.run_id == int(number)])


def _some(text: str, found: list[Sourced]) -> list[Sourced]:
    if not found:
        raise NothingFound(f"{text!r} names no record: write run:N, a database file, a GPU, or a digest's beginning")
    return found
