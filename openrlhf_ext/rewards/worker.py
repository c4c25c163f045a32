"""The process that imports and calls the user's reward function. It imports the user's file and
nothing heavy.

Protocol, pickled over one connection: the worker sends ``("ready", takes_groups)`` or
``("import_error", text)``;
``takes_groups``: the function wants all completions of a prompt at once. Then for each list of
``(query, prompt, label, completion)`` it answers ``("graded", results, said)``, of each sample a
RewardResult, or a text that says what is wrong with its answer, and how a function of verl or TRL
is called, None of one in OpenRLHF's form; or ``("raised", traceback)`` or ``("invalid", text)``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from openrlhf_ext.groups.processes import die_with
from openrlhf_ext.rewards.foreign import ForeignReward, is_foreign
from openrlhf_ext.rewards.grading import InvalidAnswer, RewardResult, parse_answer, settled
from openrlhf_ext.user_code import import_importable, line_of, told

RewardFunction = Callable[..., Any]
# the parent asks for the Python stack before it kills a worker that hangs
STACK_SIGNAL = signal.SIGUSR1
_POSITIONAL = ("queries", "prompts", "labels")


def main(
    connection_fd: int, stack_fd: int, parent_pid: int, memory_mib: int, reward_path: str
) -> None:
    """Serve one pool until the connection closes. ``stack_fd`` receives the Python stack on a crash
    or on request; this process, and each that it starts, may take ``memory_mib`` for itself."""
    die_with(parent_pid)
    # RLIMIT_DATA counts private writable memory; RLIMIT_AS would count what CUDA only reserves
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))
    faulthandler.enable(file=stack_fd)
    faulthandler.register(STACK_SIGNAL, file=stack_fd)
    connection = Connection(connection_fd)
    # the pool is gone: so are we
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        # for programs that its code starts
        folders = (os.environ.get("PYTHONPATH"), str(Path(reward_path).parent))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        try:
            function = load_reward_function(reward_path)
        except BaseException as error:  # noqa: B036  user code may raise SystemExit; the pool must hear of it
            connection.send(("import_error", _told(error)))
            return
        connection.send(("ready", getattr(function, "takes_groups", False)))
        while True:
            connection.send(_grade(function, connection.recv()))


def load_reward_function(reward_path: str) -> RewardFunction:
    """The file's ``reward_func(queries, prompts, labels, **kwargs)``; one that takes it gets
    ``completions`` too: what the model wrote, without the token that ended it. Or verl's or TRL's:
    so called, ``compute_score``, the only one of the file, or a list ``reward_funcs``. Raises
    AttributeError: there is none; TypeError: it cannot be called; whatever the file raises."""
    module = import_importable(reward_path, "reward_func")
    function = getattr(module, "reward_func", None)
    if callable(function):
        if (wrong := _wrong_signature(function)) is None:
            return function
        if is_foreign(function):
            return ForeignReward([function], module)
        raise TypeError(
            f"{line_of(function, reward_path)}: reward_func{inspect.signature(function)} cannot "
            f"be called as reward_func(queries, prompts, labels, **kwargs): {wrong}. Each is a "
            "list of one; it returns {'rewards': number, 'scores': number}"
        )
    if hasattr(module, "reward_funcs"):
        return ForeignReward(module.reward_funcs, module, getattr(module, "reward_weights", None))
    public = {
        name: one
        for name, one in vars(module).items()
        if callable(one) and not name.startswith("_")
    }
    foreign = {
        name: one
        for name, one in public.items()
        if one.__module__ == module.__name__ and is_foreign(one)
    }
    if (
        only := foreign.get("compute_score", *(foreign.values() if len(foreign) == 1 else ()))
    ) is not None:
        return ForeignReward([only], module)
    choose = (
        f"; say reward_func = one of {', '.join(foreign)}, or list them in reward_funcs"
        if foreign
        else ""
    )
    raise AttributeError(
        f"{reward_path} defines no function reward_func; it defines {sorted(public)}{choose}"
    )


def _wrong_signature(function: RewardFunction) -> str | None:
    """Why the function does not take what ``call_reward`` gives it, in that order; None if it
    does."""
    signature = inspect.signature(function)
    try:
        signature.bind(
            *_POSITIONAL, **dict.fromkeys(["completions"] if _takes_completions(function) else [])
        )
    except TypeError as error:
        return str(error)
    if "solution_str" in signature.parameters:
        return "solution_str is of verl's form"
    moved = [
        n for at, n in enumerate(signature.parameters) if n in _POSITIONAL and n != _POSITIONAL[at]
    ]
    return f"{', '.join(moved)} not in its place" if moved else None


def call_reward(
    function: RewardFunction, query: str, prompt: str, label: Any, completion: str
) -> Any:
    """A reward function's answer to one sample, told the completion if it takes that; raises what
    it raises."""
    return _answers(function, [(query, prompt, label, completion)])[0]


def _answers(function: RewardFunction, samples: list[tuple[str, str, Any, str]]) -> list[Any]:
    """To each sample. Several are TRL's group; or the trial's, which asks whether answers depend on
    each other."""
    *given, completions = map(list, zip(*samples, strict=True))
    more = {"completions": completions} if _takes_completions(function) else {}
    answer = settled(function(*given, **more))
    if isinstance(function, ForeignReward):
        return answer
    if len(samples) == 1:
        return [answer]
    return [{"rewards": one} for one, _ in zip(answer["rewards"], samples, strict=True)]


def _takes_completions(function: RewardFunction) -> bool:
    parameters = inspect.signature(function).parameters
    return "completions" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _grade(function: RewardFunction, samples: list[tuple[str, str, Any, str]]) -> tuple[Any, ...]:
    started = time.perf_counter()
    try:
        answers = _answers(function, samples)
    except InvalidAnswer as error:
        return "invalid", str(error)
    except BaseException as error:  # noqa: B036  SystemExit in user code is a failure of this sample, not of the worker
        return "raised", _told(error)
    seconds = (time.perf_counter() - started) / len(samples)
    return (
        "graded",
        [_parsed(answer, seconds) for answer in answers],
        getattr(function, "said", None),
    )


def _parsed(answer: Any, seconds: float) -> RewardResult | str:
    try:
        return parse_answer(answer, seconds)
    except InvalidAnswer as error:
        return str(error)


def _told(error: BaseException) -> str:
    if not isinstance(error, MemoryError):
        return told(error)
    allowed = resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20
    return (
        f"{told(error)}\nA grading worker may take {allowed} MiB: raise --reward.memory_mib if "
        "it needs more"
    )
