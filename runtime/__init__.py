"""The public face: which plan serves a call, and the call itself. Importing it loads neither torch nor Triton."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.runtime.engine import warmup
    from tilewright.runtime.gqa_attention import dispatch
    from tilewright.runtime.gqa_attention_module import GQAAttention
    from tilewright.runtime.replay import Replay, capture
    from tilewright.runtime.serving import Grade, Lookup, forget, lookup

__all__ = ["GQAAttention", "Grade", "Lookup", "Replay", "capture", "dispatch", "forget", "lookup", "warmup"]

_HOMES = {
    "GQAAttention": "tilewright.runtime.gqa_attention_module",
    "Grade": "tilewright.runtime.serving",
    "Lookup": "tilewright.runtime.serving",
    "Replay": "tilewright.runtime.replay",
    "capture": "tilewright.runtime.replay",
    "dispatch": "tilewright.runtime.gqa_attention",
    "forget": "tilewright.runtime.serving",
    "lookup": "tilewright.runtime.serving",
    "warmup": "tilewright.runtime.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
