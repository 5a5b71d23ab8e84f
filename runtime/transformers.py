"""Models of the transformers library with their attention served by tilewright, for Glm4Moe and Qwen3.

Prefill without a cache, or with an empty one, is served; every other call goes to the original and is counted.
transformers is imported by the first call here, not with this module.
"""

from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tilewright.errors import UsageError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Stats:
    """Calls of a model's attentions outside compiled graphs: served, and left to the original by reason."""

    served: int
    refused: dict[str, int]


@dataclass
class Patch:
    """What `patch` did: module name to original class, and module name to why it was left alone."""

    model: "nn.Module"
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def undo(self) -> None:
        """Gives every module that this patch replaced its class back; counts go with it."""
        _restore(self.model, set(self.replaced))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{name}: {original} replaced" for name, original in self.replaced.items()]
        return "\n".join([*lines, *(f"{name}: left, {why}" for name, why in self.left.items())])


class Registration:
    """The library's class mapping holds our classes until `undo`."""

    def __init__(self, names: list[str]) -> None:
        self.replaced = names

    def undo(self) -> None:
        """Models loaded from now on are the library's own; those already loaded keep their classes, see `unpatch`."""
        from transformers.monkey_patching import unregister_patch_mapping

        from tilewright.runtime import gqa_attention_transformers as served

        unregister_patch_mapping(self.replaced)
        served.forget_recorders()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch(model: "nn.Module") -> Patch:
    """Serves the attentions of a loaded model; UsageError when it has none that can be."""
    from tilewright.runtime import gqa_attention_transformers as served

    done = Patch(model)
    for name, module in served.attentions(model):
        if type(module) in served.ORIGINALS:
            done.left[name] = "served already"
        elif "forward" in module.__dict__:
            done.left[name] = "it has a forward of its own, set by a hook"
        else:
            done.replaced[name] = type(module).__name__
            module.calls = served.Calls()  # type: ignore[assignment]
            module.__class__ = served.CLASSES[type(module)]
    if not done.replaced and not done.left:
        names = ", ".join(original.__name__ for original in served.CLASSES)
        raise UsageError(f"{type(model).__name__} has no attention that can be served; accepted: {names}")
    return done


def unpatch(model: "nn.Module") -> list[str]:
    """Gives every served attention its original class back, however it came to be served; returns their names."""
    from tilewright.runtime import gqa_attention_transformers as served

    names = [name for name, module in served.attentions(model) if type(module) in served.ORIGINALS]
    _restore(model, set(names))
    return names


def register() -> Registration:
    """Models that the library makes from now on, `from_pretrained` and `from_config`, come with served attentions."""
    from transformers.monkey_patching import register_patch_mapping

    from tilewright.runtime import gqa_attention_transformers as served

    mapping: dict[str, Any] = {original.__name__: ours for original, ours in served.CLASSES.items()}
    register_patch_mapping(mapping)
    return Registration(list(mapping))


def stats(model: "nn.Module") -> Stats:
    """Summed over the model's served attentions, since they were replaced or loaded."""
    from tilewright.runtime import gqa_attention_transformers as served

    total = served.Calls()
    for _, module in served.attentions(model):
        if isinstance(module, served.Served):
            total.served += module.calls.served
            for reason, count in module.calls.refused.items():
                total.refused[reason] = total.refused.get(reason, 0) + count
    return Stats(total.served, total.refused)


def _restore(model: "nn.Module", names: set[str]) -> None:
    from tilewright.runtime import gqa_attention_transformers as served

    for name, module in served.attentions(model):
        if name in names and type(module) in served.ORIGINALS:
            module.__class__ = served.ORIGINALS[type(module)]
            del module.calls
