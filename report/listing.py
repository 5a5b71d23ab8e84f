"""One answer as rows under named columns, and how it is printed: text for 80 columns, CSV, Markdown, JSON."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewright.report.text import clean, defused

SCHEMA = 1
WIDTH = 80
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True)
class Column:
    """`form` prints a value; `wide` columns appear on demand; the column that may shrink is the `elastic` one."""

    key: str
    title: str
    form: str = "{}"
    wide: bool = False
    elastic: bool = False

    @property
    def is_number(self) -> bool:
        return self.form != "{}"

    def text(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.key)
        return "-" if value is None else clean(self.form.format(value))


@dataclass(frozen=True)
class Listing:
    """`kind` names the answer in its JSON; `head` and `foot` are lines around the table, `facts` further JSON."""

    kind: str
    columns: tuple[Column, ...]
    rows: Sequence[Mapping[str, Any]]
    head: tuple[str, ...] = ()
    foot: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def listing_text(listing: Listing, *, width: int = WIDTH, wide: bool = False) -> str:
    """The narrow columns within `width`, numbers never cut; with `wide` every column in as much room as it takes."""
    columns = [column for column in listing.columns if wide or not column.wide]
    cells = [[column.text(row) for column in columns] for row in listing.rows]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    longest = [max([len(c.title), *(len(line[i]) for line in cells)]) for i, c in enumerate(columns)]
    room = (10_000 if wide else width) - sum(n + 1 for c, n in zip(columns, longest, strict=True) if not c.elastic)
    for column in columns:
        limit = max(room - 1, len(column.title)) if column.elastic else None
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=limit,
        )
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    out = io.StringIO()
    console = Console(file=out, width=10_000 if wide else width, no_color=True, highlight=False)
    for text in listing.head:
        console.print(Text(clean(text)))
    if listing.rows:
        console.print(table)
    for text in listing.foot:
        console.print(Text(clean(text)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def listing_csv(listing: Listing) -> str:
    """Every column, numbers bare, everything else defused."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.key for column in listing.columns])
    writer.writerows([_csv_cell(row.get(column.key)) for column in listing.columns] for row in listing.rows)
    return out.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (bool, int, float)):
        return str(value)
    return defused(clean(value if isinstance(value, str) else json.dumps(value, sort_keys=True)))


def listing_markdown(listing: Listing) -> str:
    """A table that no cell can break out of; every column."""
    lines = [*(f"{_markdown(line)}  " for line in listing.head), ""] if listing.head else []
    lines += [_row(column.title for column in listing.columns)]
    lines += [_row("---:" if column.is_number else "---" for column in listing.columns)]
    lines += [_row(_markdown(column.text(row)) for column in listing.columns) for row in listing.rows]
    lines += ["", *(f"{_markdown(line)}  " for line in listing.foot)] if listing.foot else []
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    """Text as text: no table rule, link, image, emphasis or HTML comes of it."""
    return "".join(
        f"\\{c}" if c in "\\|`*_[]#!~" else {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(c, c) for c in clean(text)
    )


def listing_json(listing: Listing) -> dict[str, Any]:
    """Schema 1: `kind`, `rows` as they were found, and the facts of this kind; times in microseconds."""
    return {"schema": SCHEMA, "kind": listing.kind, **listing.facts, "rows": [dict(row) for row in listing.rows]}
