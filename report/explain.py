"""Why a record is the record: its final, its ties, its neighbours, what mattered, and where each stage's time goes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.db.reader import Reader
from tilewright.db.rows import Level, Status, StoredRecord, StoredTrial
from tilewright.db.summaries import Wanted, matching
from tilewright.problem import Ceilings, WeightMode, WorkloadCase
from tilewright.report.listing import Column, Listing
from tilewright.report.queries import known_problem

Importance = Callable[[Sequence[tuple[Mapping[str, Any], float]]], Mapping[str, float]]
NEIGHBOURS = 12  # of each stage, the nearest in time

_FINALISTS = (
    Column("name", "finalist"),
    Column("median_us", "median us", "{:.1f}"),
    Column("ratio", "ratio", "{:.3f}"),
    Column("standing", "standing"),
    Column("label", "plan", elastic=True),
    Column("low_us", "low us", "{:.1f}", wide=True),
    Column("high_us", "high us", "{:.1f}", wide=True),
    Column("failure", "failure", wide=True),
)
_STAGES = (
    Column("template", "stage", elastic=True),
    Column("median_us", "alone us", "{:.1f}"),
    Column("share", "share", "{:.0%}"),
    Column("floor_us", "floor us", "{:.1f}"),
    Column("percent_sol", "% SOL", "{:.0f}"),
    Column("bound", "bound by"),
    Column("flops", "flops", "{:.3g}", wide=True),
    Column("bytes", "bytes", "{:.3g}", wide=True),
    Column("config", "config", wide=True),
)
_NEIGHBOURS = (
    Column("template", "stage"),
    Column("parameter", "parameter"),
    Column("here", "winner"),
    Column("there", "neighbour"),
    Column("median_us", "median us", "{:.1f}"),
    Column("ratio", "ratio", "{:.3f}"),
    Column("outcome", "outcome", elastic=True),
)
_IMPORTANCE = (
    Column("template", "stage"),
    Column("parameter", "parameter", elastic=True),
    Column("share", "share", "{:.0%}"),
    Column("trials", "trials", "{:d}"),
)


@dataclass(frozen=True)
class Explanation:
    """One record in four tables and some lines."""

    record: StoredRecord
    source: str
    head: tuple[str, ...]
    tables: tuple[Listing, ...]

    def to_json(self) -> dict[str, Any]:
        """Schema 1; each table's rows under its own name."""
        stored, record = self.record, self.record.record
        return {
            "schema": 1,
            "kind": "explain",
            "problem": stored.problem,
            "case": stored.case_name,
            "gpu": stored.environment.gpu_name,
            "triton": stored.environment.triton,
            "environment": stored.environment.digest,
            "regime": record.regime,
            "source": self.source,
            "verdict": record.verdict.value,
            "reason": str(record.evidence.get("reason", "")),
            "median_us": record.median_us if stored.environment.kind == "cuda" else None,
            "plan": record.plan,
            **{table.kind: [dict(row) for row in table.rows] for table in self.tables},
        }


def explain(stored: StoredRecord, source: str, reader: Reader | None, importance: Importance) -> Explanation:
    """`reader` answers about the trials of the record's own database; without one only the final is told."""
    measured = stored.environment.kind == "cuda"
    tables = [_finalists(stored)] if measured else []
    trials = _trials(stored, reader) if reader is not None else []
    tables.append(_stages(stored, trials))
    if measured:
        tables += [_neighbours(stored, trials), _importance(stored, trials, importance)]
    return Explanation(stored, source, _head(stored, source), tuple(tables))


def _head(stored: StoredRecord, source: str) -> tuple[str, ...]:
    env, record = stored.environment, stored.record
    lines = [f"{stored.problem} {stored.case_name} on {env.gpu_name}, Triton {env.triton}, {record.regime} ({source})"]
    lines += [f"  {stage.get('template', '?')} {_values(stage.get('values'))}".rstrip() for stage in record.plan]
    if env.kind == "cuda" and record.median_us is not None:
        interval = f" [{record.low_us:.1f}, {record.high_us:.1f}]" if record.low_us and record.high_us else ""
        lines.append(f"{record.median_us:.1f} us{interval}, verdict {record.verdict.value}")
    else:
        lines.append(f"verdict {record.verdict.value}: times of this device are no measurements")
    reason = record.evidence.get("reason")
    return (*lines, f"why: {reason}") if reason else tuple(lines)


def _values(values: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items()) if isinstance(values, Mapping) else ""


def _finalists(stored: StoredRecord) -> Listing:
    """Everyone in the final, with the paired ratio to the holder; `tie` is within noise of the winner."""
    evidence = stored.record.evidence
    ties = evidence.get("ties") or ()
    rows = []
    for entry in evidence.get("finalists") or ():
        name, time_us, ratio = str(entry.get("name", "")), entry.get("time_us"), entry.get("ratio_to_holder")
        low, high = (time_us[1], time_us[2]) if time_us and len(time_us) == 3 else (None, None)
        won = name == stored.record.digest
        rows.append(
            {
                "name": name[:12] if entry.get("plan") else name,
                "median_us": time_us[0] if time_us else None,
                "ratio": ratio[0] if ratio else None,
                "standing": "winner" if won else "tie" if name in ties else str(entry.get("source", "")),
                "label": str(entry.get("label", "")),
                "low_us": low,
                "high_us": high,
                "failure": str(entry.get("failure", "")),
            }
        )
    rows.sort(key=lambda row: (row["median_us"] is None, row["median_us"] or 0.0))
    head = (f"final: {len(rows)} contestants, {evidence.get('rounds', '?')} rounds, tie set of {len(ties) + 1}",)
    return Listing("finalists", _FINALISTS, rows, head=head)


def _trials(stored: StoredRecord, reader: Reader) -> list[StoredTrial]:
    """Stage trials of the record's case in its environment and regime."""
    env = stored.environment
    wanted = Wanted(stored.problem, (stored.case_name,), environment=env.digest, level=Level.STAGE)
    found = reader.ask(lambda session: matching(session, wanted))
    record = stored.record
    return [t for t in found if t.trial.case_key == record.case_key and t.trial.regime == record.regime]


def _stages(stored: StoredRecord, trials: Sequence[StoredTrial]) -> Listing:
    """Each stage alone against its own floor: the sum may differ from the block, where stages overlap in cache."""
    case, ceilings = case_of(stored), ceilings_of(stored)
    measured = stored.environment.kind == "cuda"
    rows = []
    for stage in stored.record.plan:
        time_us = _time_of(stage, trials) if measured else None
        row: dict[str, Any] = {"template": str(stage.get("template", "?")), "median_us": time_us}
        row |= _roofline(str(stage.get("template", "")), case, ceilings, time_us)
        rows.append({**row, "config": stage.get("values") or {}})
    known = [row["median_us"] for row in rows if row["median_us"] is not None]
    for row in rows:
        row["share"] = row["median_us"] / sum(known) if row["median_us"] is not None else None
    block = stored.record.median_us
    foot: tuple[str, ...] = ()
    if len(known) == len(rows) and known and block and measured:
        foot = (f"stages alone {sum(known):.1f} us, the whole block {block:.1f} us",)
    return Listing("stages", _STAGES, rows, head=("stages:",), foot=foot)


def _roofline(
    template: str, case: WorkloadCase | None, ceilings: Ceilings | None, time_us: float | None
) -> dict[str, Any]:
    """FLOPs and fewest bytes of the ops that the template covers, and which ceiling they meet first."""
    from tilewright.kernel_templates.families import load_family
    from tilewright.kernel_templates.plan import stage_reads, stage_writes

    empty = dict.fromkeys(("flops", "bytes", "floor_us", "percent_sol", "bound"))
    if case is None:
        return empty
    registry = load_family(case.problem.family).registry
    if template not in registry:
        return empty
    found = registry[template]
    segment = found.segment(case.problem.op_names)
    flops = sum(case.op_flops(op) for op in case.problem.ops if op.name in segment)
    size = case.bytes_of(*stage_reads(found, case), *stage_writes(found, case))
    if ceilings is None:
        return {**empty, "flops": flops, "bytes": size}
    floor = ceilings.floor_us(flops, size)
    memory = size / ceilings.bytes_per_s > flops / ceilings.flops_per_s
    share = 100 * floor / time_us if time_us else None
    bound = "memory" if memory else "compute"
    return {"flops": flops, "bytes": size, "floor_us": floor, "percent_sol": share, "bound": bound}


def case_of(stored: StoredRecord) -> WorkloadCase | None:
    """The record's case with the problem's constants; None where the problem is not known here as it was."""
    problem = known_problem(stored.problem)
    for suite in problem.suites if problem else ():
        assert problem is not None
        mode: WeightMode = "packed" if stored.record.weight_mode == "packed" else "separate"
        case = problem.at_suite(suite).case(weight_mode=mode, **stored.axes)
        if case.key == stored.record.case_key:
            return case
    return None


def ceilings_of(stored: StoredRecord) -> Ceilings | None:
    env = stored.environment
    known = env.kind == "cuda" and env.peak_flops_per_s and env.peak_bytes_per_s
    return Ceilings(env.peak_flops_per_s or 1.0, env.peak_bytes_per_s or 1.0) if known else None


def _of_template(stage: Mapping[str, Any], trials: Sequence[StoredTrial]) -> list[StoredTrial]:
    name = stage.get("template")
    return [t for t in trials if t.trial.template == name and isinstance(t.trial.config, Mapping)]


def _time_of(stage: Mapping[str, Any], trials: Sequence[StoredTrial]) -> float | None:
    """The newest sound time of exactly this stage."""
    same = [t for t in _of_template(stage, trials) if t.trial.config == stage.get("values") and _sound(t)]
    return same[-1].trial.median_us if same else None


def _sound(stored: StoredTrial) -> bool:
    return not stored.invalid and stored.trial.status is Status.OK and stored.trial.median_us is not None


def _neighbours(stored: StoredRecord, trials: Sequence[StoredTrial]) -> Listing:
    """Trials that differ from a winning stage in one parameter: what a step in each direction costs."""
    rows: list[dict[str, Any]] = []
    for stage in stored.record.plan:
        values = stage.get("values") or {}
        base = _time_of(stage, trials)
        near = {}
        for found in _of_template(stage, trials):
            changed = [
                n for n in values.keys() | found.trial.config.keys() if values.get(n) != found.trial.config.get(n)
            ]
            if len(changed) == 1:
                near[changed[0], repr(found.trial.config.get(changed[0]))] = found
        mine = [_neighbour(str(stage.get("template")), name, values, t, base) for (name, _), t in near.items()]
        mine.sort(key=lambda row: (row["ratio"] is None, row["ratio"] or 0.0, row["parameter"]))
        rows += mine[:NEIGHBOURS]
    return Listing("neighbours", _NEIGHBOURS, rows, head=("neighbours, one parameter away:",) if rows else ())


def _neighbour(
    template: str, name: str, values: Mapping[str, Any], stored: StoredTrial, base: float | None
) -> dict[str, Any]:
    trial = stored.trial
    time_us = trial.median_us if _sound(stored) else None
    return {
        "template": template,
        "parameter": name,
        "here": str(values.get(name)),
        "there": str(trial.config.get(name)),
        "median_us": time_us,
        "ratio": time_us / base if time_us and base else None,
        "outcome": trial.status.value + (f": {trial.reason}" if trial.reason else ""),
    }


def _importance(stored: StoredRecord, trials: Sequence[StoredTrial], importance: Importance) -> Listing:
    rows = []
    for stage in stored.record.plan:
        found = [t for t in _of_template(stage, trials) if _sound(t)]
        shares = importance([(t.trial.config, float(t.trial.median_us or 0.0)) for t in found])
        name = str(stage.get("template"))
        rows += [{"template": name, "parameter": p, "share": s, "trials": len(found)} for p, s in shares.items()]
    head = ("parameter importance (Optuna, PED-ANOVA):",) if rows else ()
    return Listing("importance", _IMPORTANCE, rows, head=head)
