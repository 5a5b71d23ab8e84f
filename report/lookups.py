"""One lookup in words, from the document that `Lookup.to_json` makes."""

from collections.abc import Mapping
from typing import Any

from tilewright.report.text import clean


def lookup_text(found: Mapping[str, Any], *, explain: bool = False) -> str:
    """What is served; with `explain`, also each record that could serve, the fields that differ, and its use."""
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
        for candidate in found.get("candidates", ()):
            lines += _candidate(candidate)
    return "\n".join(clean(line) for line in lines) + "\n"


def _candidate(candidate: Mapping[str, Any]) -> list[str]:
    time = "" if candidate["median_us"] is None else f", {candidate['median_us']:.1f} us there"
    where = f"{candidate['gpu']}, Triton {candidate['triton']}{time}"
    return [
        f"  {candidate['grade']} record of {candidate['case']} on {where}",
        f"    {candidate['use']}",
        f"    plan {candidate['label']}, from {candidate['layer']} {candidate['source']}",
        *(f"    differs: {difference}" for difference in candidate["differences"]),
    ]


def _values(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
