"""Whether what is stored was made by the templates that are installed here."""

from tilewright.db.rows import Level, StoredRecord, TrialRow
from tilewright.errors import UsageError
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan, Registry
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


def current_hash(registry: Registry, row: TrialRow) -> str | None:
    """The hash that the sources of a trial's templates have now; None where a template is no longer there."""
    if row.level is Level.STAGE:
        return registry[row.template].source_hash if row.template in registry else None
    plan = FusionPlan.from_json(row.config)
    if any(stage.template not in registry for stage in plan.stages):
        return None
    return registry.source_hash(plan)
