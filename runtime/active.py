"""The records that matter to a machine: what each tuned case of this card would be served here."""

from pathlib import Path

from tilewright.problem import Problem, case_of_key
from tilewright.runtime.differences import identity_differences
from tilewright.runtime.layers import record_sets
from tilewright.runtime.machine import Machine
from tilewright.runtime.serving import Grade, Lookup, lookup


def lookups_of_records(
    problem: Problem, machine: Machine, *, db: str | Path | None = None, allow_stale: bool | None = None
) -> list[Lookup]:
    """One lookup for each case of the problem that has a record from this card, whatever its compiler and source."""
    keys = set[str]()
    for records in record_sets(db):
        for key, stored in records.of_case.items():
            differences = (identity_differences(one.environment, machine.environment) for one in stored)
            if any(all(text.startswith("triton ") for text in fields) for fields in differences):
                keys.add(key)
    cases = [case for key in sorted(keys) if (case := case_of_key(key, (problem,))) is not None]
    cases.sort(key=lambda case: (tuple(case.shape_axes.values()), case.key))
    return [lookup(case, machine, db=db, allow_stale=allow_stale) for case in cases]


def objection(found: Lookup) -> str:
    """What keeps a record of the case from being served here; empty where one is, a stale one included."""
    if found.grade in (Grade.EXACT, Grade.COMPATIBLE, Grade.STALE):
        return ""
    for passed in found.passed_over:
        if passed.obstacle:
            return f"not served: {passed.obstacle}"
    stale = [passed for passed in found.passed_over if passed.grade is Grade.STALE]
    return f"stale: {'; '.join(stale[0].differences)}" if stale else "not served here"
