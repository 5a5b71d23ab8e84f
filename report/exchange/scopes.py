"""Which names of a module's text mean the module's own globals, and where they stand."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = (
    ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
)


@dataclass(frozen=True)
class Use:
    """A global name, or an attribute of one, in the text; `annotation` where nothing evaluates it."""

    name: str
    node: ast.Name | ast.Attribute
    attribute: str = ""
    annotation: bool = False
    quoted: bool = False  # inside an f-string, where positions are not to be trusted


def global_uses(statement: ast.stmt) -> Iterator[Use]:
    """Every use of a name that no enclosing function or comprehension binds."""
    yield from _uses(statement, frozenset(), annotation=False, quoted=False)


def _uses(node: ast.AST, bound: frozenset[str], *, annotation: bool, quoted: bool) -> Iterator[Use]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in bound:
        yield Use(node.value.id, node, node.attr, annotation, quoted)
        return
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in bound:
            yield Use(node.id, node, "", annotation, quoted)
        return
    inner = bound | _bound_by(node) if isinstance(node, Scope) else bound
    for name, child in _children(node):
        told = annotation or name in ("annotation", "returns")
        seen = bound if name in OUTSIDE else inner
        yield from _uses(child, seen, annotation=told, quoted=quoted or isinstance(node, ast.JoinedStr))


# Evaluated where a function or a comprehension stands, not inside it. What a class body binds no method sees.
OUTSIDE = frozenset({"decorator_list", "defaults", "kw_defaults", "annotation", "returns", "first_iter"})


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Children with the fields that they stand in; a function's parameters and a first `in` are taken apart."""
    for name, value in ast.iter_fields(node):
        for position, child in enumerate(value if isinstance(value, list) else (value,)):
            if isinstance(child, ast.arguments):
                yield from _children(child)
                for argument in ast.walk(child):
                    if isinstance(argument, ast.arg) and argument.annotation is not None:
                        yield "annotation", argument.annotation
            elif name == "generators" and position == 0 and isinstance(child, ast.comprehension):
                yield "first_iter", child.iter
                yield from (("inside", part) for part in (child.target, *child.ifs))
            elif isinstance(child, ast.AST) and not isinstance(child, ast.arg):
                yield name, child


def _bound_by(scope: Scope) -> frozenset[str]:
    """Parameters and everything that is assigned inside, nested functions aside."""
    names: set[str] = set()
    if isinstance(scope, Function):
        arguments = scope.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        names.update(argument.arg for argument in every if argument is not None)
    for child in ast.iter_child_nodes(scope):
        names |= _assigned(child)
    return frozenset(names)


def _assigned(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Lambda):
        return set()
    names = bound_names(node)
    for child in ast.iter_child_nodes(node):
        names |= _assigned(child)
    return names


def bound_names(node: ast.AST) -> set[str]:
    """Names that this node binds by itself, assignments aside: imports and exception handlers."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ExceptHandler) and node.name:
        return {node.name}
    return set()


def defined_names(statement: ast.stmt) -> set[str]:
    """What a statement at the top of a module defines there."""
    return _assigned(statement)
