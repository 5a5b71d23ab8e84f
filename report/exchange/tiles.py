"""Tuned tiles alone, as vLLM and SGLang keep them: one JSON file a template, rows of activations -> config."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright.db.rows import StoredRecord
from tilewright.errors import UsageError
from tilewright.report.explain import case_of
from tilewright.report.listing import Column, Listing

_NAMES = {"BLOCK_M": "BLOCK_SIZE_M", "BLOCK_N": "BLOCK_SIZE_N", "BLOCK_K": "BLOCK_SIZE_K", "GROUP_M": "GROUP_SIZE_M"}


def tile_files(records: Iterable[StoredRecord], stages: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """File name -> {rows: config} for each template that `stages` names with the axes of its file name.

    Rows are the product of the case's variable axes, batch x sequence; of two cases with as many rows the one with the
    larger last axis speaks. Raises UsageError for records of more than one device or compiler.
    """
    files: dict[str, dict[str, Any]] = {}
    places = set()
    for stored in sorted(records, key=lambda s: tuple(s.axes.values())):
        case = case_of(stored)
        if case is None:
            continue
        places.add((stored.environment.gpu_name, stored.environment.triton))
        if len(places) > 1:
            raise UsageError("the records come from more than one GPU or Triton; choose with --gpu and --env")
        rows = 1
        for size in case.shape_axes.values():
            rows *= size
        for stage in stored.record.plan:
            template = str(stage.get("template"))
            if stage.get("values") and template in stages:
                sizes = ",".join(f"{axis}={case[axis]}" for axis in stages[template])
                name = file_name(template, sizes, stored.environment.gpu_name, case.problem.dtype)
                values = {_NAMES.get(key, key): value for key, value in sorted(stage["values"].items())}
                files.setdefault(name, {})[str(rows)] = values
    return {name: dict(sorted(table.items(), key=lambda item: int(item[0]))) for name, table in sorted(files.items())}


def file_name(template: str, sizes: str, gpu_name: str, dtype: str) -> str:
    """Nothing in it can leave a folder."""
    parts = [
        f"op={template}",
        *([sizes] if sizes else []),
        f"device_name={gpu_name.replace(' ', '_')}",
        f"dtype={dtype}",
    ]
    return "".join(c if c.isalnum() or c in "=,._-" else "_" for c in ",".join(parts)).replace("..", "__") + ".json"


def tiles_listing(records: Iterable[StoredRecord]) -> Listing:
    """One row for each stage of each record, for CSV."""
    columns = tuple(
        Column(name, name) for name in ("gpu", "triton", "problem", "case", "position", "template", "config", "digest")
    )
    rows = [
        {
            "gpu": stored.environment.gpu_name,
            "triton": stored.environment.triton,
            "problem": stored.problem,
            "case": stored.case_name,
            "position": position,
            "template": str(stage.get("template")),
            "config": stage.get("values") or {},
            "digest": stored.record.digest,
        }
        for stored in records
        for position, stage in enumerate(stored.record.plan)
    ]
    return Listing("tiles", columns, rows)
