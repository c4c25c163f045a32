"""``openrlhf-ext COMMAND ...``: every command that a user types. Imports the module of the chosen one only."""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Sequence

from openrlhf_ext import __version__
from openrlhf_ext.inputs import nearest

_COMMANDS = {
    "train": ("train_ppo_ray", "train a policy: --config FILE.yaml; with --dry_run say whether it would start"),
    "plan": ("plan", "layouts of a run that fit on so many GPUs, and their predicted seconds of a step"),
    "evaluate": ("evaluate", "accuracy of a checkpoint on benchmarks or on data of your own"),
    "report": ("report", "one HTML page about one run or several"),
    "explain": ("explain", "what a method does to the tokens of a group of completions"),
    "convert": ("convert", "prove that a Hugging Face checkpoint goes in and out of the policy unchanged"),
    "doctor": ("doctor", "whether this machine can run openrlhf_ext; with --cluster the nodes of a Ray cluster"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first word names.

    Returns:
        That command's exit status, 141 if nobody reads its output any more; 0 after --help and --version; 2 if there is
        no such command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words in (["--help"], ["-h"], ["help"]):
        print(_usage())
        return 0
    if words == ["--version"]:
        print(f"openrlhf_ext {__version__}")
        return 0
    name = words[0].replace("-", "_")
    if name not in _COMMANDS:
        near = nearest(words[0], [*_COMMANDS, "--version", "--help"])
        hint = f"did you mean {near}?" if near else f"commands: {', '.join(_COMMANDS)}"
        print(f"openrlhf-ext: no command {words[0]!r}; {hint}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"openrlhf_ext.cli.{_COMMANDS[name][0]}")
    try:
        try:
            status: int = command.main(words[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        # `| head` has read enough; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as the shell says of a command that SIGPIPE has ended
    return status


def _reader_has_left() -> bool:
    """Whether nobody reads standard output any more: the pipe that broke may have been another one."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _usage() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in _COMMANDS.items()]
    return "\n".join(["usage: openrlhf-ext COMMAND ...   (openrlhf-ext COMMAND --help says more)", "", *lines])
