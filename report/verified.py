"""What `tilewright verify` found, in words, from its JSON document."""

from collections.abc import Mapping
from typing import Any

from tilewright.report.text import clean


def verified_text(report: Mapping[str, Any]) -> str:
    """A line a case: the verdict, the time now and as recorded, and why."""
    lines = [f"{'case':<10}{'verdict':<8}{'us now':>9}{'recorded':>10}  why"]
    for case in report["cases"]:
        now = case["times_us"].get("record", {}).get("median")
        times = f"{_us(now):>9}{_us(case['recorded_us']):>10}"
        noisy = f" (noisy: {case['noisy']})" if case["noisy"] else ""
        lines.append(f"{case['case']:<10}{case['verdict']:<8}{times}  {case['reason']}{noisy}")
    kept, count = report["keep"], len(report["cases"])
    lines.append(f"{kept} of {count} kept in {report['seconds']:.0f} s")
    for one in report.get("reproductions") or ():
        lines.append(f"{one['case']}: {one['trust'] or 'not recorded'}, {one['note']}")
    if report["retune"]:
        cases = " ".join(f"--case {name}" for name in report["retune"])
        lines.append(f"tune again: tilewright tune --problem {report['problem']} {cases}")
    return "\n".join(clean(line) for line in lines)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
