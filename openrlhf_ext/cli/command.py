"""What the commands share: a parser that offers the nearest word, and silence of the libraries."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from openrlhf_ext.inputs import nearest

_QUIET = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


def silence_libraries() -> None:
    """Keeps warnings, progress bars and chatter of libraries off the terminal, here and in processes started later.

    Each variable of the environment that is set already stays: ``PYTHONWARNINGS=default`` shows the warnings.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if os.environ["PYTHONWARNINGS"] == "ignore":  # read when Python starts, so this process needs it said again
        warnings.simplefilter("ignore")


class CommandParser(argparse.ArgumentParser):
    """Parses the words of ``openrlhf-ext COMMAND``; unknown options and choices get the nearest known one.

    Args:
        takes_run_options: words that are no options of the command may be those of a run.
    """

    def __init__(self, command: str, about: str | None, *, takes_run_options: bool = False) -> None:
        super().__init__(prog=f"openrlhf-ext {command}", description=about, allow_abbrev=not takes_run_options)
        self._takes_run_options = takes_run_options

    # parse_args calls it; mypy knows three overloads of it
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if wrong := list(self._misspelled(sys.argv[1:] if args is None else args)):
            self.error("; ".join(wrong))
        return super().parse_known_args(args, namespace)

    def _misspelled(self, words: Sequence[str]) -> Iterator[str]:
        """Found before argparse looks: it would only say that the option which was meant is missing."""
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        for word in (word.partition("=")[0] for word in words if word.startswith("--") and word != "--"):
            if any(name == word or (self.allow_abbrev and name.startswith(word)) for name in known):
                continue
            near = nearest(word, known, cutoff=0.6)
            if self._takes_run_options:
                if near and not _is_run_option(word.removeprefix("--")):
                    yield f"unknown option {word}; did you mean {near}?"
            else:
                yield f"unknown option {word}; " + (f"did you mean {near}?" if near else "--help lists all options")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = nearest(str(value), choices)
            hint = f"; did you mean {near}?" if near else ""
            raise argparse.ArgumentError(action, f"expected one of {', '.join(choices)}, got {value}{hint}")

    def error(self, message: str) -> NoReturn:
        """Ends the program with the message and status 2; the usage is long, and the message names the option."""
        self.exit(2, f"{self.prog}: {message}\n")


def at_least(smallest: int) -> Callable[[str], int]:
    """``type`` of an option that is a whole number of at least this."""

    def whole_number(text: str) -> int:
        if (value := int(text)) < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {text}")
        return value

    return whole_number


positive = at_least(1)


def _is_run_option(name: str) -> bool:
    from openrlhf_ext.config.table import find_option  # late: the doctor has to run where packages are missing

    return "." in name or find_option(name) is not None
