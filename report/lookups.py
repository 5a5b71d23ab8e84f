"""One lookup in words, from the document that `Lookup.to_json` makes."""

from collections.abc import Mapping
from typing import Any

from tilewright.report.text import clean


def lookup_text(found: Mapping[str, Any], *, explain: bool = False) -> str:
    """What is served; with `explain`, also what was passed over and which fields differ."""
    lines = [
        f"{found['case']}: {found['grade']} ({found['layer']})",
        f"  plan    {found['label']}",
        *(f"          {stage['template']} {_values(stage['values'])}".rstrip() for stage in found["plan"]),
        f"  why     {found['reason']}",
    ]
    if found["median_us"] is not None:
        lines.append(f"  time    {found['median_us']:.1f} us")
    if explain:
        lines.append(f"  key     {found['key']}")
        lines += [f"  from    {found['source']}"] if found["source"] else []
        lines += [f"  differs {difference}" for difference in found["differences"]]
        for passed in found["passed_over"]:
            lines.append(f"  passed over: {passed['grade']} record in {passed['source']}")
            lines += [f"    {difference}" for difference in passed["differences"]]
    return "\n".join(clean(line) for line in lines) + "\n"


def _values(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
