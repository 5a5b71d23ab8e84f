"""Whether a stored record can still be served by the templates that are installed here."""

from tilewright.db.rows import StoredRecord
from tilewright.errors import UsageError
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import load_problem


def has_current_sources(stored: StoredRecord) -> bool:
    """False where a kernel changed since, or is unknown here."""
    try:
        registry = load_family(load_problem(stored.problem).family).registry
        plan = FusionPlan.from_json(stored.record.plan)
        known = all(stage.template in registry for stage in plan.stages)
        return known and registry.source_hash(plan) == stored.record.source_hash
    except (UsageError, KeyError, TypeError, ValueError):
        return False
