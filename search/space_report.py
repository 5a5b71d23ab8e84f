"""What `tilewright space` prints: how large the space of a case is, which plans there are, and why configs are out."""

from dataclasses import dataclass
from typing import Any

from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.families import load_family
from tilewright.problem import WorkloadCase
from tilewright.search.space import KINDS, StageSpace, case_spaces, plans_of


@dataclass(frozen=True)
class SpaceReport:
    """The spaces of one case on one device, before anything is compiled."""

    case: WorkloadCase
    limits: Limits
    spaces: dict[str, StageSpace]
    plans: tuple[str, ...]

    def to_json(self, *, enumerate_configs: bool = False) -> dict[str, Any]:
        return {
            "schema": "tilewright.space/1",
            "case": self.case.name,
            "capability": self.limits.capability,
            "plans": list(self.plans),
            "templates": {
                name: {
                    "covers": list(space.template.segment(self.case.problem.op_names)),
                    "raw": space.raw_size,
                    "valid": len(space.valid),
                    "rejected": {
                        reason: {"count": count, "example": dict(space.examples[reason])}
                        for reason, count in space.rejected.items()
                    },
                    **({"configs": [dict(values) for values in space.valid]} if enumerate_configs else {}),
                }
                for name, space in self.spaces.items()
            },
        }

    def text(self) -> str:
        lines = [f"{self.case.name} on sm_{self.limits.capability}: {len(self.plans)} plans"]
        lines += [f"  {plan}" for plan in self.plans]
        for name, space in self.spaces.items():
            lines.append(f"{name}: {space.raw_size} raw, {len(space.valid)} valid")
            for reason, count in sorted(space.rejected.items(), key=lambda entry: -entry[1]):
                lines.append(f"  {count:>7} {reason}")
                example = " ".join(f"{key}={value}" for key, value in space.examples[reason].items())
                lines.append(f"          e.g. {example}"[:120])
        return "\n".join(lines)


def report_space(case: WorkloadCase, limits: Limits, *, triton_only: bool = False) -> SpaceReport:
    registry = load_family(case.problem.family).registry
    spaces = case_spaces(registry, case, limits, ("triton",) if triton_only else KINDS)
    return SpaceReport(case, limits, spaces, tuple(plans_of(registry, case, list(spaces))))
