"""Changes to a text by position, which leave everything else as it was written."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, order=True)
class Edit:
    """Replaces what stands between two places by `new`; lines from 1, columns in bytes of UTF-8 from 0."""

    line: int
    column: int
    end_line: int
    end_column: int
    new: str

    @classmethod
    def over(cls, node: ast.expr, new: str) -> Self:
        return cls(node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0, new)


def apply_edits(lines: Sequence[str], first: int, last: int, edits: Iterable[Edit]) -> str:
    """Lines `first` to `last` with the edits made; edits do not overlap."""
    text = [line.encode() for line in lines]
    for edit in sorted(set(edits), reverse=True):
        head, tail = text[edit.line - 1][: edit.column], text[edit.end_line - 1][edit.end_column :]
        text[edit.line - 1 : edit.end_line] = [head + edit.new.encode() + tail, *[b""] * (edit.end_line - edit.line)]
    return b"".join(text[first - 1 : last]).decode()


def without_annotations(statement: ast.stmt, lines: Sequence[str]) -> list[Edit]:
    """Parameters, results and variables lose their annotations; fields of classes keep a neutral one."""
    edits: list[Edit] = []
    fields = {id(child) for node in ast.walk(statement) if isinstance(node, ast.ClassDef) for child in node.body}
    for node in ast.walk(statement):
        if isinstance(node, ast.arg) and node.annotation is not None:
            start = node.col_offset + len(node.arg.encode())
            edits.append(_until(node.lineno, start, node.annotation, ""))
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            line = lines[node.returns.lineno - 1].encode()
            arrow = line.rindex(b"->", 0, node.returns.col_offset)
            edits.append(_until(node.returns.lineno, len(line[:arrow].rstrip()), node.returns, ""))
        elif isinstance(node, ast.AnnAssign):
            if id(node) in fields or node.value is None:
                edits.append(Edit.over(node.annotation, "object"))
            else:
                target = node.target
                edits.append(_until(target.end_lineno or 0, target.end_col_offset or 0, node.annotation, ""))
    return edits


def _until(line: int, column: int, annotation: ast.expr, new: str) -> Edit:
    return Edit(line, column, annotation.end_lineno or line, annotation.end_col_offset or 0, new)
