"""A solution from elsewhere before it runs: which problem it is for, and what is refused unread by any machine."""

import hashlib
import json

from tilewright.errors import UsageError
from tilewright.problem import problem_names
from tilewright.report.exchange.schema import PYTHON_LANGUAGES, Solution, complaints

TOLERATED = ("autotune", "compile", "load")  # slow or fragile, not dishonest; a tensor descriptor's load is no build

MOST_NAME = 500


def problem_of(definition: str) -> str:
    """The shipped problem that a definition's name means: ours, or a board's `NNN_` before it."""
    number, _, rest = definition.partition("_")
    for name in problem_names():
        if definition == name or (number.isdigit() and rest == name):
            return name
    known = ", ".join(problem_names())
    raise UsageError(f"definition {definition!r} is no shipped problem ({known}); name one with --problem")


def refuse(solution: Solution, shown: str) -> None:
    """Raises UsageError for what cannot be measured fairly here: other languages, threads, streams, graphs, builds."""
    for field, text in (("name", solution.name), ("author", solution.author)):
        if "\x00" in text or len(text) > MOST_NAME:
            raise UsageError(f"{shown}: {field} must have at most {MOST_NAME} characters and no NUL, got {text[:40]!r}")
    other = sorted(set(map(str.lower, solution.spec.all_languages)) - PYTHON_LANGUAGES)
    if other:
        accepted = ", ".join(sorted(PYTHON_LANGUAGES))
        raise UsageError(f"{shown}: languages {', '.join(other)} cannot be measured here; accepted: {accepted}")
    for source in solution.sources:
        if not source.path.endswith(".py"):
            continue
        try:
            found = [text for text in complaints(source.content) if _is_grave(text)]
        except (SyntaxError, ValueError, RecursionError) as error:
            raise UsageError(f"{shown}: {source.path} is no Python: {error}") from error
        if found:
            raise UsageError(f"{shown}: {source.path} {'; '.join(sorted(set(found)))}, which is not measured")


def _is_grave(complaint: str) -> bool:
    """Other packages may be installed or not; what leaves the timed stream, or reaches into the judge, is refused."""
    verb, _, name = complaint.partition(" ")
    if verb == "calls":
        return name not in TOLERATED
    return name.partition(".")[0] in ("tilewright", "threading", "subprocess", "ctypes", "cupti", "pynvml")


def digest_of(solution: Solution) -> str:
    """Identity of the code: sources and entry, whatever the file says about them."""
    spec = solution.spec
    content = [sorted((s.path, s.content) for s in solution.sources), spec.entry_point, spec.destination_passing_style]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
