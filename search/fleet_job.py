"""One job of the fleet: a case and the request it comes from, as JSON that any version of a worker can judge."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.errors import UsageError
from tilewright.problem import WorkloadCase, load_problem
from tilewright.search.run import TuneRequest

SCHEMA = 1
SCHEMA_OF_PARTS = 2  # a worker that knows no parts would tune the whole case for each
CARRIED = (
    "problem", "effort", "trials", "budget", "seed", "sampler", "min_gain", "regime", "warm_l2", "weights",
    "triton_only", "refinal",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One board's share of a case; the parts of one case in one request form a group."""

    group: str
    number: int
    parts: int


@dataclass(frozen=True)
class FleetJob:
    """`request` holds the budget of this one case; its database and device are the worker's."""

    request: TuneRequest
    suite: str
    case: str
    case_key: str
    part: Part | None = None

    def to_json(self) -> dict[str, Any]:
        carried = {name: getattr(self.request, name) for name in CARRIED}
        content = {"suite": self.suite, "case": self.case, "case_key": self.case_key, **carried}
        if self.part is None:
            return {"schema": SCHEMA, **content}
        return {"schema": SCHEMA_OF_PARTS, **content, "part": vars(self.part)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "FleetJob":
        if content.get("schema") not in (SCHEMA, SCHEMA_OF_PARTS):
            raise UsageError(f"the job has schema {content.get('schema')}, this worker knows up to {SCHEMA_OF_PARTS}")
        request = TuneRequest(**{name: content[name] for name in CARRIED})
        part = Part(**content["part"]) if "part" in content else None
        return cls(request, content["suite"], content["case"], content["case_key"], part)

    def resolve(self) -> WorkloadCase:
        """The case as this host's files have it; raises UsageError where they say something else."""
        problem = load_problem(self.request.problem).at_suite(self.suite)
        case = problem.parse_case(self.case, weight_mode=self.request.weights)
        if case.key != self.case_key:
            raise UsageError(f"case {self.case} of {problem.name} is {case.key} here and {self.case_key} in the job")
        return case
