"""What `tilewright bench` calls: the plans that the runtime would serve here, against the family's baselines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from tilewright.db.environment import Environment
from tilewright.errors import UsageError
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.search.bench import BenchReport, run_cases
from tilewright.search.outcome import PROTOCOL, MeasureOptions
from tilewright.search.request import resolve
from tilewright.search.run import environment_json
from tilewright.search.session import DeviceSession

# For the device described: which plan the runtime would serve for a case, and its grade.
PlanServer = Callable[[Environment, Limits], Callable[[WorkloadCase], tuple[FusionPlan, str]]]


@dataclass(frozen=True)
class BenchRequest:
    """The options of `tilewright bench`."""

    problem: str
    cases: Sequence[str] = ()
    suite: str | None = None
    device: str = "auto"
    db: str | None = None
    baselines: Sequence[str] = ()
    rounds: int = 50


def run_bench(
    request: BenchRequest, server: PlanServer, says: Callable[[str], None] = lambda text: None
) -> BenchReport:
    """Raises UsageError for a baseline that the family does not have."""
    selection = resolve(request.problem, cases=request.cases, suite=request.suite, device=request.device)
    family = load_family(selection.problem.family)
    baselines = tuple(request.baselines) or ("eager", *family.final_baselines)
    for name in baselines:
        if name not in family.baselines:
            raise UsageError(f"baseline must be one of {', '.join(family.baselines)}, got {name!r}")
    options = MeasureOptions(input_sets=4)
    with DeviceSession(selection.device) as session:
        described = session.describe()
        if described.limits.kind == "interpret":
            baselines = ("eager",)
            says("the interpreter's times are no measurements: they only show that everything runs")
        cases = run_cases(
            selection.cases,
            server(described.environment, described.limits),
            device=session,
            baselines=baselines,
            rounds=request.rounds,
            options=options,
            ceilings=described.ceilings,
            says=says,
        )
    protocol = {
        "version": PROTOCOL,
        "regime": options.regime,
        "cold_l2": options.cold_l2,
        "input_sets": options.input_sets,
        "rounds": request.rounds,
        "statistic": "median of rounds; ratios are paired by round; intervals are 95 % order statistics",
    }
    return BenchReport(
        problem=selection.problem.name,
        environment=environment_json(described.environment),
        protocol=protocol,
        cases=cases,
        tool_version=version("tilewright"),
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        measures=described.limits.kind != "interpret",
    )
