"""Where the layers of a model are, read off its structure: for models without a row in the table of architectures."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import nn


# a class is called attention, and the words behind are not those of a part; the words before may be the name of a model
ATTENTION = re.compile(r"(attention|attn)(?!.*(norm|output|pool|dropout|scale|embed|bias|mask))", re.IGNORECASE)
CROSS = re.compile("cross|encoder_attn|encdec|encoder_decoder", re.IGNORECASE)
# the word in the path of a list of layers, and the name of its tower; the first that fits
WORDS = (
    ("text|language", "text"),
    ("visi|visual|image|video", "vision"),
    ("audio|speech|acoustic", "audio"),
    ("decoder", "decoder"),
    ("encoder", "encoder"),
)


@dataclass(frozen=True)
class Tower:
    """The layers of one side of a model, in the order of its lists: an encoder, a decoder, or one of several modalities."""

    name: str
    path: str
    layers: tuple[nn.Module, ...]

    @property
    def kind(self) -> str:
        return next((kind for words, kind in WORDS if re.search(words, self.path)), "")


def attention_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The innermost modules with weights whose class is called attention, with their paths."""
    for path, module in root.named_modules():
        if attends(module) and not any(attends(inner) for inner in module.modules() if inner is not module):
            yield path, module


def attends(module: nn.Module) -> bool:
    name = type(module).__name__
    return (
        ATTENTION.search(name) is not None
        and next(module.parameters(), None) is not None
        and not isinstance(module, nn.ModuleList)
    )


def self_attentions(layer: nn.Module) -> list[nn.Module]:
    """The attention modules of a layer that read the layer's own tokens."""
    return [module for path, module in attention_modules(layer) if path and not CROSS.search(path)]


def self_attention(layer: nn.Module) -> nn.Module | None:
    return next(iter(self_attentions(layer)), None)


def lists_of_layers(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """The outermost lists whose entries have at most one self-attention each, and some have one; lists in the stages of one
    list are joined."""
    for name, child in root.named_children():
        path = f"{prefix}{name}"
        if not isinstance(child, nn.ModuleList | nn.Sequential):
            yield from lists_of_layers(child, f"{path}.")
            continue
        counts = [len(self_attentions(entry)) for entry in child]
        if max(counts, default=0) == 1:
            yield path, tuple(child)
            continue
        inner = list(lists_of_layers(child, f"{path}."))
        if inner and max(counts) > 1:
            yield f"{path}.*.{inner[0][0].rsplit('.', 1)[-1]}", tuple(layer for _, layers in inner for layer in layers)


def towers_of(root: nn.Module) -> list[Tower]:
    found = list(lists_of_layers(root))
    fitting = [[name for words, name in WORDS if re.search(words, path)] for path, _ in found]
    first = [names[:1] for names in fitting]
    towers = []
    for names, (path, layers) in zip(fitting, found, strict=True):
        # the first word of a path, or if others start with it, a word that no other path has
        alone = [name for name in names if sum(name in others for others in fitting) == 1]
        alone = names[:1] if first.count(names[:1]) == 1 else alone
        towers.append(Tower(next(iter(alone), path), path, layers))
    return towers


_wanted: ContextVar[str | None] = ContextVar("tower", default=None)


@contextmanager
def choosing_tower(name: str | None) -> Iterator[None]:
    """Within the block, [`tower_of`] returns the tower of this name."""
    token = _wanted.set(name)
    try:
        yield
    finally:
        _wanted.reset(token)


def chosen_tower() -> str | None:
    """The name that [`choosing_tower`] was given."""
    return _wanted.get()


def tower_of(root: nn.Module) -> Tower:
    """The tower that is chosen now, or the only one; a `ValueError` that lists the towers otherwise."""
    towers, wanted = towers_of(root), _wanted.get()
    if not towers:
        raise ValueError(
            f"{type(root).__name__} has no list of layers in which each layer has one attention module, so it cannot be measured."
        )
    chosen = [tower for tower in towers if wanted in (None, tower.name, tower.path)]
    if len(chosen) != 1:
        names = ", ".join(repr(tower.name) for tower in towers)
        given = "" if wanted is None else f", got {wanted!r}"
        raise ValueError(
            f"{type(root).__name__} has {len(towers)} {'list' if len(towers) == 1 else 'lists'} of layers: give one as `tower`, of "
            f"{names}{given}."
        )
    return chosen[0]
