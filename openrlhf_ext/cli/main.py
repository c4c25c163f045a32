"""``openrlhf-ext COMMAND ...``: every command that a user types, and what the commands share.

Imports the module of the chosen one only.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from openrlhf_ext import __version__
from openrlhf_ext.inputs import did_you_mean, shipped, shortened
from openrlhf_ext.redaction import printable

_COMMANDS = {
    "train": (
        "train_ppo_ray",
        "train a policy: --config FILE.yaml; with --dry_run, check whether it would start",
    ),
    "train_sft": (
        "train_sft",
        "supervised fine-tuning, without Ray: --config FILE.yaml, --dry_run",
    ),
    "plan": (
        "plan",
        "layouts of a run that fit on a number of GPUs, and their predicted seconds per step",
    ),
    "evaluate": ("evaluate", "accuracy of a checkpoint on benchmarks or your own data"),
    "ledger": (
        "ledger",
        "whether every prompt of a run was trained exactly once, or why it was not",
    ),
    "report": ("report", "one HTML page about one run or several"),
    "explain": ("explain", "what a method does to the tokens of a group of completions"),
    "convert": (
        "convert",
        "prove that the policy loads and exports a checkpoint unchanged, or write one",
    ),
    "chaos": (
        "chaos",
        "inject faults, drawn from a seed, into a run and report which it survives",
    ),
    "doctor": (
        "doctor",
        "whether this machine can run openrlhf_ext; with --cluster, the nodes of a Ray cluster",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of the command that the first word names, 141 if nobody reads its output any
    more; 2 if there is no such command."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except ModuleNotFoundError as error:
        if not _is_of_the_stack(error):
            raise
        print(
            missing_stack(f"openrlhf-ext needs {error.name}, which is not installed"),
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        # `| head` has read enough; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as the shell says of a command that SIGPIPE has ended


def _run(words: list[str]) -> int:
    if not words or words in (["--help"], ["-h"], ["help"]):
        width = max(map(len, _COMMANDS))
        print("usage: openrlhf-ext COMMAND ...   (openrlhf-ext COMMAND --help says more)\n")
        print("\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in _COMMANDS.items()))
        return 0
    if words == ["--version"]:
        print(f"openrlhf_ext {__version__}")
        return 0
    name = words[0].replace("-", "_")
    if name not in _COMMANDS:
        hint = did_you_mean(
            words[0], [*_COMMANDS, "--version", "--help"], f"commands: {', '.join(_COMMANDS)}"
        )
        print(f"openrlhf-ext: no command {words[0]!r}; {hint}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"openrlhf_ext.cli.{_COMMANDS[name][0]}")
    status: int = command.main(words[1:])
    return status


def _is_of_the_stack(error: ModuleNotFoundError) -> bool:
    """Whether this package imports what is missing, and not the user's own file."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return (
        str(frame.f_globals.get("__name__")).split(".")[0]
        == "openrlhf_ext"
        != (error.name or "").split(".")[0]
    )


def missing_stack(what: str) -> str:
    """What is missing, and how the stack is installed where `setup_env.sh` of the checkout is not
    used."""
    locks, pins = shipped("requirements"), "torch==2.13.0 deepspeed==0.19.6"
    return (
        f"{what}. In a checkout, bash examples/scripts/setup_env.sh installs all that is needed; "
        "elsewhere, with CUDA gpu.lock instead:\n  pip install --no-deps --ignore-requires-python "
        f"-r {locks / 'cpu.lock'}\n  DS_BUILD_OPS=0 pip install --use-pep517 --no-deps "
        f"{pins}\nopenrlhf-ext doctor then shows what is still missing"
    )


def _reader_has_left() -> bool:
    """Whether nobody reads standard output any more: the pipe that broke may have been another
    one."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


# ---- what the commands share

_QUIET = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


def silence_libraries() -> None:
    """Keeps warnings, progress bars and chatter of libraries off the terminal, here and in
    processes started later.

    A variable that is set already stays: ``PYTHONWARNINGS=default`` shows the warnings.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    # which transformers may import; it sets its own level then, and warns of a machine without a
    # GPU
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    # read when Python starts, so this process needs it said again
    if os.environ["PYTHONWARNINGS"] == "ignore":
        warnings.simplefilter("ignore")


def show(text: object, file: Any = None, errors: str = "backslashreplace") -> None:
    """Prints what the output's encoding can show, and nothing that a terminal obeys: completions
    and tokens may hold anything."""
    stream = file or sys.stdout
    encoding = stream.encoding or "utf-8"
    print(printable(str(text)).encode(encoding, errors).decode(encoding), file=stream, flush=True)


def chosen_layout(config: Any) -> Mapping[str, Any]:
    """What ``megatron.layout auto`` comes to."""
    from openrlhf_ext.planning import fit

    return fit.choice(config)


class CommandParser(argparse.ArgumentParser):
    """Parses the words of ``openrlhf-ext COMMAND``; unknown options and choices get the nearest
    known one.

    ``takes_run_options``: words that are no options of the command may be those of a run.
    """

    def __init__(self, command: str, about: str | None, *, takes_run_options: bool = False) -> None:
        super().__init__(
            prog=f"openrlhf-ext {command}", description=about, allow_abbrev=not takes_run_options
        )
        self._takes_run_options = takes_run_options

    # parse_args calls it; mypy knows three overloads of it
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if wrong := list(self._misspelled(sys.argv[1:] if args is None else args)):
            self.error("; ".join(wrong))
        return super().parse_known_args(args, namespace)

    def _misspelled(self, words: Sequence[str]) -> Iterator[str]:
        """Found before argparse looks: it would only say that the option which was meant is
        missing."""
        known = [
            name
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--")
        ]
        for word in (
            word.partition("=")[0] for word in words if word.startswith("--") and word != "--"
        ):
            if any(name == word or (self.allow_abbrev and name.startswith(word)) for name in known):
                continue
            hint = did_you_mean(
                word,
                known,
                "" if self._takes_run_options else "--help lists all options",
                cutoff=0.6,
            )
            if hint and not (self._takes_run_options and _is_run_option(word.removeprefix("--"))):
                yield f"unknown option {word}; {hint}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), choices, "--help says more")
            raise argparse.ArgumentError(
                action, f"expected one of {', '.join(choices)}, got {value}; {hint}"
            )

    def error(self, message: str) -> NoReturn:
        """Ends the program with the message and status 2; the usage is long, and the message names
        the option."""
        self.exit(2, printable(f"{self.prog}: {shortened(message)}\n"))


def at_least(smallest: int) -> Callable[[str], int]:
    """``type`` of an option that is a whole number of at least this."""

    def whole_number(text: str) -> int:
        try:
            if (value := int(text)) >= smallest:
                return value
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {text}")

    return whole_number


positive = at_least(1)


def _is_run_option(name: str) -> bool:
    # late: the doctor has to run where packages are missing
    from openrlhf_ext.config import option_table

    return "." in name or option_table().find(name) is not None
