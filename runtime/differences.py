"""In what a record's environment differs from the one here: field by field, versions ordered as versions."""

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from tilewright.db.environment import Environment, public_version

IDENTITY_FIELDS = ("kind", "gpu_name", "sm_count", "memory_gib", "capability", "mig", "triton")
BESIDE_FIELDS = ("torch", "cuda", "driver", "ptxas")


def identity_differences(there: Environment, here: Environment) -> Iterator[str]:
    """Fields that keep a record from being served as exact; a local build tag of Triton is no difference."""
    for name, a, b in zip(IDENTITY_FIELDS, there.identity, here.identity, strict=True):
        if name == "triton" and version(a) is not None and version(a) == version(b):
            continue
        if a != b:
            yield f"{name} {a or 'none'} there, {b or 'none'} here" + (age(a, b) if name == "triton" else "")


def beside_differences(there: Environment, here: Environment) -> tuple[str, ...]:
    """Fields outside the identity that are known on both sides and differ."""
    pairs = ((name, getattr(there, name), getattr(here, name)) for name in BESIDE_FIELDS)
    return tuple(f"{name} {a} there, {b} here{age(a, b)}" for name, a, b in pairs if a and b and a != b)


def version(text: str) -> Version | None:
    """Without the local build tag; None for what is no version."""
    try:
        return Version(public_version(text))
    except InvalidVersion:
        return None


def age(there: str, here: str) -> str:
    """3.10 is newer than 3.9; empty where one is no version, or only build tags differ."""
    a, b = version(there), version(here)
    if a is None or b is None or a == b:
        return ""
    return " (older)" if a < b else " (newer)"
