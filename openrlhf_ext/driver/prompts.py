"""The prompts of a run, one after the other, over all of its episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One prompt that was drawn.

    Attributes:
        number: how many were drawn before it.
        text, label: what is sampled from, and what the reward function gets.
    """

    number: int
    text: str
    label: Any


class PromptStream:
    """Draws prompts from OpenRLHF's resumable loader until the episodes are over.

    Args:
        loader: ``StatefulDataLoader`` over a ``PromptDataset``, one prompt at a time.
        episodes: passes over the data.
    """

    def __init__(self, loader: Any, episodes: int) -> None:
        self._loader, self._episodes = loader, episodes
        self._iterator: Any = None
        self._episode = self.drawn = 0

    def draw(self) -> Prompt | None:
        """The next prompt; None when there are no more."""
        while self._episode < self._episodes:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            item = next(self._iterator, None)
            if item is not None:
                _, (text,), (label,), _ = item
                self.drawn += 1
                return Prompt(self.drawn - 1, text, label)
            self._iterator, self._episode = None, self._episode + 1
        return None

    def state_dict(self) -> dict[str, Any]:
        """The place in the data."""
        return {"episode": self._episode, "drawn": self.drawn, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a place."""
        self._episode, self.drawn = state["episode"], state["drawn"]
        self._loader.load_state_dict(state["loader"])
        self._iterator = None


def all_prompts(loader: Iterable[Any]) -> list[Prompt]:
    """One pass over a loader."""
    return [Prompt(number, text, label) for number, (_, (text,), (label,), _) in enumerate(loader)]
