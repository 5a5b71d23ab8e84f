"""What was tried: the fastest trials, the failures by reason, and what is covered. Each answer is a Listing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from typing import Any

from tilewright.db.reader import Reader
from tilewright.db.rows import Level, StoredTrial
from tilewright.db.summaries import Wanted, covered, failures, fastest
from tilewright.problem import problem_names
from tilewright.report.listing import Column, Listing
from tilewright.report.queries import Sourced, known_problem

Readers = Mapping[str, Reader]  # by source: database, shipped

_TOP = (
    Column("case", "case"),
    Column("median_us", "median us", "{:.1f}"),
    Column("ratio", "ratio", "{:.3f}"),
    Column("label", "candidate", elastic=True),
    Column("q1_us", "q1 us", "{:.1f}", wide=True),
    Column("q3_us", "q3 us", "{:.1f}", wide=True),
    Column("error_ratio", "error", "{:.2f}", wide=True),
    Column("gpu", "gpu", wide=True),
    Column("triton", "triton", wide=True),
    Column("regime", "regime", wide=True),
    Column("noisy", "noisy", wide=True),
    Column("run_id", "run", wide=True),
    Column("trial_id", "trial", wide=True),
    Column("source", "source", wide=True),
    Column("config", "config", wide=True),
)
_FAILURES = (
    Column("status", "status"),
    Column("count", "count", "{:d}"),
    Column("cases", "cases", "{:d}"),
    Column("template", "template"),
    Column("reason", "reason", elastic=True),
    Column("level", "level", wide=True),
    Column("example", "example", wide=True),
    Column("source", "source", wide=True),
)
_COVERAGE = (
    Column("case", "case"),
    Column("trials", "trials", "{:d}"),
    Column("ok", "ok", "{:d}"),
    Column("templates", "templates", "{:d}"),
    Column("record", "record"),
    Column("gpu", "gpu", elastic=True),
    Column("triton", "triton", wide=True),
    Column("gpu_s", "gpu s", "{:.0f}", wide=True),
    Column("last", "last", wide=True),
    Column("problem", "problem", wide=True),
    Column("environment", "environment", wide=True),
    Column("source", "source", wide=True),
)


def top(readers: Readers, wanted: Wanted, count: int) -> Listing:
    """The fastest trials of each case; whole plans unless a template or a level is named."""
    level = wanted.level or (Level.STAGE if wanted.template else Level.PLAN)
    wanted = replace(wanted, level=level)
    rows: list[dict[str, Any]] = []
    for source, reader in readers.items():
        found = reader.ask(lambda session: fastest(session, wanted, count))
        for _, group in groupby(found, key=lambda t: (t.problem, t.trial.case_key, t.environment.digest)):
            rows += _top_rows(source, list(group))
    return Listing("top", _TOP, rows, facts={"level": level.value})


def _top_rows(source: str, found: Sequence[StoredTrial]) -> list[dict[str, Any]]:
    best = found[0].trial.median_us
    return [
        {
            "problem": stored.problem,
            "case": stored.case_name,
            "median_us": stored.trial.median_us,
            "ratio": stored.trial.median_us / best if stored.trial.median_us and best else None,
            "label": stored.trial.label,
            "q1_us": stored.trial.q1_us,
            "q3_us": stored.trial.q3_us,
            "error_ratio": stored.trial.error_ratio,
            "gpu": stored.environment.gpu_name,
            "triton": stored.environment.triton,
            "environment": stored.environment.digest,
            "regime": stored.trial.regime,
            "noisy": stored.trial.noisy,
            "run_id": stored.run_id,
            "trial_id": stored.id,
            "source": source,
            "config": stored.trial.config,
        }
        for stored in found
    ]


def failing(readers: Readers, wanted: Wanted) -> Listing:
    """Trials that are not OK, gathered by status, template and reason; numbers in reasons count as one."""
    gathered: dict[tuple[str, ...], dict[str, Any]] = {}
    for source, reader in readers.items():
        for row in reader.ask(lambda session: failures(session, wanted)):
            reason = re.sub(r"\d[\d.e+-]*", "N", row["reason"])
            key = (source, row["status"], row["level"], row["template"], reason)
            entry = gathered.setdefault(
                key,
                {
                    "status": row["status"],
                    "count": 0,
                    "cases": 0,
                    "template": row["template"] or "(plan)",
                    "reason": reason,
                    "level": row["level"],
                    "example": row["reason"],
                    "source": source,
                },
            )
            entry["count"] += row["count"]
            entry["cases"] = max(entry["cases"], row["cases"])
    rows = sorted(gathered.values(), key=lambda row: (-row["count"], row["status"], row["template"], row["reason"]))
    return Listing("failures", _FAILURES, rows, foot=(f"{sum(row['count'] for row in rows)} failed trials",))


def coverage(readers: Readers, records: Sequence[Sourced], wanted: Wanted) -> Listing:
    """Trials and records of each case and environment, and the suites' cases that nothing is known of."""
    active = {(r.source, r.stored.record.case_key, r.stored.environment.digest): r.stored for r in records}
    rows = []
    for source, reader in readers.items():
        for row in reader.ask(lambda session: covered(session, wanted)):
            stored = active.pop((source, row["case_key"], row["environment"].digest), None)
            rows.append(_coverage_row(source, row, stored.record.verdict.value if stored else None))
    for (source, _, _), stored in active.items():  # records that came without their trials
        bare = {"case": stored.case_name, "problem": stored.problem, "environment": stored.environment}
        rows.append(_coverage_row(source, bare, stored.record.verdict.value))
    rows.sort(key=lambda r: (r["problem"], r["gpu"], r["triton"], r["case"], r["source"]))
    missing = _missing({str(row["problem"]) for row in rows} | ({wanted.problem} if wanted.problem else set()), rows)
    foot = tuple(
        f"{problem}, {suite} suite: {len(names)} missing: {', '.join(names)}" for problem, suite, names in missing
    )
    facts = {"missing": [{"problem": p, "suite": s, "cases": names} for p, s, names in missing]}
    return Listing("coverage", _COVERAGE, rows, foot=foot, facts=facts)


def _coverage_row(source: str, row: Mapping[str, Any], verdict: str | None) -> dict[str, Any]:
    env = row["environment"]
    last = row.get("last")
    return {
        "case": row["case"],
        "trials": row.get("trials", 0),
        "ok": row.get("ok", 0),
        "templates": row.get("templates", 0),
        "record": verdict,
        "gpu": env.gpu_name,
        "triton": env.triton,
        "gpu_s": row.get("gpu_s"),
        "last": last.isoformat() if isinstance(last, datetime) else None,
        "problem": row["problem"],
        "environment": env.digest,
        "source": source,
    }


def _missing(problems: set[str], rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """Cases of the full suites without a record on any GPU."""
    have = {(row["problem"], row["case"]) for row in rows if row["record"]}
    found = []
    for name in sorted(problems & set(problem_names())):
        known = known_problem(name)
        names = [case.name for case in known.suite("full") if (name, case.name) not in have] if known else []
        found += [(name, "full", names)] if names else []
    return found
