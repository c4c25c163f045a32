"""The cells of a study, most telling first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.fp8_study.settings import RECIPES
from openrlhf_ext.fp8.recipe import Recipe

BUILD = "build"
BF16 = "bf16"
VARIANTS = ("recompute", "many")


@dataclass(frozen=True)
class Cell:
    """One process and one entry of the JSON.

    Attributes:
        kind: 'build' (of TransformerEngine), 'linear', 'products', 'layers', 'engine', 'mismatch',
            'run'.
        way: a recipe of ``settings.RECIPES``, 'bf16', or a run of ``runs.RUNS``; of 'mismatch'
            always 'emulated'.
        tokens: of a sequence; 0 where it does not matter.
        ranks: the layers are those that one of so many tensor-parallel ranks holds.
        variant: 'recompute', 'many' micro-batches, or neither.
    """

    kind: str
    way: str = ""
    tokens: int = 0
    ranks: int = 1
    variant: str = ""

    @property
    def name(self) -> str:
        """'layers/blockwise/4096', 'layers/blockwise/4096/tp8': its key in the JSON and its name on
        the command line."""
        ranks = f"tp{self.ranks}" if self.ranks > 1 else ""
        return "/".join(
            filter(None, [self.kind, self.way, str(self.tokens or ""), ranks, self.variant])
        )

    @classmethod
    def named(cls, name: str) -> Cell:
        """The cell of a name."""
        kind, way, tokens, *others = (f"{name}//").split("/")
        ranks = [int(part.removeprefix("tp")) for part in others if part.startswith("tp")]
        variants = [part for part in others if part in VARIANTS]
        return cls(kind, way, int(tokens or 0), *(ranks or [1]), *variants)

    @property
    def plain(self) -> Cell:
        """The same without FP8."""
        return replace(self, way=BF16)

    def seconds(self, study: dict[str, Any]) -> float:
        """Its limit."""
        return study["build_seconds"] if self.kind == BUILD else study["cell_seconds"]

    @property
    def environment(self) -> dict[str, str]:
        """What TransformerEngine reads when it is imported: each scale format has a process of its
        own."""
        recipe = RECIPES.get(self.way)
        return {} if recipe is None else recipe.environment

    def recipe(self, *, emulate: bool) -> Recipe | None:
        """How its layers multiply; None: in BF16."""
        return None if self.way == BF16 else replace(RECIPES[self.way], emulate=emulate)


def cells_of(study: dict[str, Any], *, build: bool) -> list[Cell]:
    """All cells in the order in which they are measured.

    Args:
        build: TransformerEngine comes with a bundle and has to be built.
    """
    recipes, pow2 = study["recipes"], ["blockwise_pow2"] if "blockwise" in study["recipes"] else []
    by_kind = {
        "linear": [Cell("linear", way) for way in [*recipes, *pow2]],
        "products": [Cell("products", way) for way in [*recipes, *pow2]],
        "layers": list(_layers(study)),
        "engine": [Cell("engine", way) for way in (BF16, "blockwise")],
        "mismatch": [Cell("mismatch", "emulated")],
        "run": [Cell("run", way) for way in study["run"]["ways"]],
    }
    return [
        *([Cell(BUILD)] if build else []),
        *(cell for kind in study["kinds"] for cell in by_kind[kind]),
    ]


def _layers(study: dict[str, Any]) -> Iterator[Cell]:
    """Every length with all ranks before the next length; then what else a step may do, at the
    first length."""
    settings = study["layers"]
    mlp = [f"{recipe}_mlp" for recipe in settings["mlp_only"]]
    for tokens in settings["sequences"]:
        for ranks in settings["tensor_parallel"]:
            # whole matrices gain everywhere
            for way in [BF16, *study["recipes"], *(mlp if ranks > 1 else [])]:
                yield Cell("layers", way, tokens, ranks)
    for variant in settings["variants"]:
        for ranks in sorted({min(settings["tensor_parallel"]), max(settings["tensor_parallel"])}):
            for way in [BF16, *study["recipes"]]:
                yield Cell("layers", way, settings["sequences"][0], ranks, variant)
