"""Integer arithmetic over named axes, as problem files write it: `num_heads * head_dim`."""

import ast
import operator
from collections.abc import Callable, Mapping

from tilewright.errors import ProblemError

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str, axes: Mapping[str, int]) -> int:
    """Value of `expression`; raises ProblemError for syntax outside + - * // % and for unknown names."""
    try:
        return _value(ast.parse(expression, mode="eval").body, axes)
    except SyntaxError as error:
        raise ProblemError(f"expression {expression!r} is not arithmetic over axes") from error
    except ZeroDivisionError as error:
        raise ProblemError(f"expression {expression!r} divides by zero") from error


def names(expression: str) -> frozenset[str]:
    """The axes that `expression` reads."""
    return frozenset(node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name))


def _value(node: ast.expr, axes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            if name not in axes:
                raise ProblemError(f"unknown axis {name!r}; known: {', '.join(sorted(axes))}")
            return axes[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, axes), _value(right, axes))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, axes)
        case _:
            raise ProblemError(f"{ast.unparse(node)!r} is not arithmetic over axes (accepted: + - * // %)")
