"""What a tuning run would do, said without doing it."""

from dataclasses import dataclass
from typing import Any

from tilewright.db.environment import Environment
from tilewright.db.paths import locate
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.families import Family, load_family
from tilewright.search.effort import effort_named
from tilewright.search.replay import ReplayDevice
from tilewright.search.request import Selection
from tilewright.search.run import TuneRequest, environment_json, open_device
from tilewright.search.space import case_spaces, plans_of


@dataclass(frozen=True)
class DryRun:
    """What a run would search, and where it would write."""

    selection: Selection
    limits: Limits
    environment: Environment
    database: str
    request: TuneRequest
    family: Family

    def to_json(self) -> dict[str, Any]:
        registry = self.family.registry
        effort = effort_named(self.request.effort)
        cases = []
        for case in self.selection.cases:
            spaces = case_spaces(registry, case, self.limits, self.request.kinds)
            trials = sum(min(len(space.valid), effort.stage_trials) for space in spaces.values())
            cases.append(
                {
                    "case": case.name,
                    "plans": list(plans_of(registry, case, list(spaces))),
                    "templates": {
                        name: {"raw": s.raw_size, "valid": len(s.valid), "rejected": dict(s.rejected)}
                        for name, s in spaces.items()
                    },
                    "trials": trials + effort.plan_trials,
                }
            )
        return {
            "schema": "tilewright.dry_run/1",
            "problem": self.selection.problem.name,
            "environment": environment_json(self.environment),
            "database": self.database,
            "effort": effort.name,
            "cases": cases,
        }

    def text(self) -> str:
        content = self.to_json()
        lines = [f"{self.environment.gpu_name}, effort {content['effort']}, database {self.database} (not touched)"]
        for case in content["cases"]:
            lines.append(f"{case['case']}: {len(case['plans'])} plans, at most {case['trials']} trials")
            for name, space in case["templates"].items():
                reasons = ", ".join(f"{reason} {count}" for reason, count in space["rejected"].items())
                lines.append(f"  {name:<20} {space['valid']:>5} of {space['raw']:>6} configs valid  {reasons}"[:110])
        return "\n".join(lines)


def plan_run(request: TuneRequest) -> DryRun:
    """Looks at the device and the spaces; writes nothing."""
    selection = request.select()
    with open_device(selection.device) as session:
        described = session.describe()
        family = session.family if isinstance(session, ReplayDevice) else load_family(selection.problem.family)
    return DryRun(selection, described.limits, described.environment, locate(request.db).shown, request, family)
