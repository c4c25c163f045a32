"""The cells of a study, most telling first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.fp8_study.settings import RECIPES
from openrlhf_ext.fp8.recipe import Recipe

BUILD = "build"
BF16 = "bf16"
SCALINGS = ("blockwise", "rowwise", "tensorwise")


@dataclass(frozen=True)
class Cell:
    """One process and one entry of the JSON.

    Attributes:
        kind: 'build' (of TransformerEngine), 'linear', 'products', 'scaled_mm' or 'layers'.
        way: a recipe of ``settings.RECIPES``, 'bf16', or a scaling of ``torch.nn.functional.scaled_mm``.
        tokens: of a sequence; 0 where it does not matter.
    """

    kind: str
    way: str = ""
    tokens: int = 0

    @property
    def name(self) -> str:
        """'layers/blockwise/4096': its key in the JSON and its name on the command line."""
        return "/".join([self.kind, *filter(None, [self.way]), *([str(self.tokens)] if self.tokens else [])])

    def seconds(self, study: dict[str, Any]) -> float:
        """Its limit."""
        return study["build_seconds"] if self.kind == BUILD else study["cell_seconds"]

    @property
    def environment(self) -> dict[str, str]:
        """What TransformerEngine reads when it is imported: each scale format has a process of its own."""
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
        "products": [
            *(Cell("products", way) for way in recipes), *(Cell("scaled_mm", scaling) for scaling in SCALINGS),
            *(Cell("products", way) for way in pow2),
        ],
        "layers": [
            Cell("layers", way, tokens) for tokens in study["layers"]["sequences"] for way in [BF16, *recipes]
        ],
    }  # fmt: skip
    return [*([Cell(BUILD)] if build else []), *(cell for kind in study["kinds"] for cell in by_kind[kind])]
