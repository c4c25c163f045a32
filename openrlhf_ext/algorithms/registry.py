"""Algorithms by name. A user's own module or file registers one with `register_algorithm`; nothing
here changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from openrlhf_ext.algorithms.base import Algorithm
from openrlhf_ext.algorithms.importance import parse_correction
from openrlhf_ext.algorithms.kl import parse_kl
from openrlhf_ext.algorithms.option_blocks import Options, parse
from openrlhf_ext.options import Option, describe, nearest
from openrlhf_ext.user_code import import_file, told

logger = logging.getLogger(__name__)

METHODS = "openrlhf_ext.algorithms.methods"
"""The folder of the methods that come with the package; each has the name of its file."""
_ALGORITHMS: dict[str, type[Algorithm]] = {}
A = TypeVar("A", bound=type[Algorithm])


def register_algorithm(name: str, options: type[Options]) -> Callable[[A], A]:
    """Class decorator: make an algorithm known under `name`, configured by the fields of `options`.

    Raises:
        ValueError: the name is taken by another class, or is not that of its file in `methods/`.
    """

    def register(cls: A) -> A:
        known = _ALGORITHMS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise ValueError(
                f"algorithm {name!r} is already registered by "
                f"{known.__module__}.{known.__qualname__}"
            )
        package, _, file = cls.__module__.rpartition(".")
        if package == METHODS and file != name:
            raise ValueError(
                f"algorithm {name!r} must be in methods/{name}.py, not in {file}.py: files name "
                "methods"
            )
        cls.name = name
        cls.Options = options
        _ALGORITHMS[name] = cls
        return cls

    return register


def algorithm_names() -> list[str]:
    """Names of all registered algorithms, sorted."""
    return sorted(_ALGORITHMS)


def algorithm_class(name: str) -> type[Algorithm]:
    """The class registered under `name`; ValueError with the nearest name otherwise."""
    if name not in _ALGORITHMS:
        hint = (
            "; 'gtpo' names two different methods: gtpo_entropy and gtpo_conflict."
            if name.lower() == "gtpo"
            else ""
        )
        near = nearest(name, _ALGORITHMS)
        hint = hint or (f"; did you mean {near!r}?" if near else ".")
        raise ValueError(
            f"unknown algorithm {name!r}{hint} Algorithms: {', '.join(algorithm_names())}"
        )
    return _ALGORITHMS[name]


def describe_options(name: str) -> list[Option]:
    """The options of an algorithm with type, default, choices and help, sorted by name."""
    return sorted(describe(algorithm_class(name).Options).values(), key=lambda option: option.name)


def option_keys(name: str) -> set[str]:
    """Names of the options of an algorithm."""
    return set(algorithm_class(name).Options.model_fields)


def foreign_keys(name: str) -> set[str]:
    """Names of the options that only other algorithms have."""
    return {key for other in _ALGORITHMS for key in option_keys(other)} - option_keys(name)


def with_published_values(
    name: str, options: Mapping[str, Any], *, max_length: int | None
) -> dict[str, Any]:
    """The given options, and published values for options without a default: what a command line
    passes on.

    The published weights (`OptionInfo.recommended`) are those of version v6; `l_norm` is published
    as the maximum completion length.

    Args:
        max_length: tokens; None: unknown, nothing is supplied for `l_norm`.
    """
    described = describe(algorithm_class(name).Options)

    def effective(key: str) -> Any:
        return options.get(key, described[key].default if key in described else None)

    published: dict[str, Any] = {}
    if effective("version") == "v6":
        recommended = {key: option.info.recommended for key, option in described.items()}
        published = {key: value for key, value in recommended.items() if value is not None}
    if effective("agg") == "seq-mean-token-sum-norm" and max_length is not None:
        published["l_norm"] = max_length
    return {**published, **options}


def get_algorithm(
    name: str,
    *,
    correction: Mapping[str, Any] | None = None,
    kl: Mapping[str, Any] | None = None,
    entropy_coef: float = 0.0,
    warn: bool = True,
    **options: Any,
) -> Algorithm:
    """Build an algorithm.

    Args:
        name: registry name, e.g. "gtpo_entropy".
        correction: train/rollout importance correction (`level`, `mode`, `gating`, `threshold`),
        None for none.
        kl: KL to the reference policy (`coef`, `estimator` k1|k2|k3, `place` loss|reward); instead
            of `kl_coef`, which is the k3 penalty in the loss.
        entropy_coef: weight of an entropy bonus: the loss falls by it times the mean entropy of the
        loss tokens.
        warn: log what has no effect or deserves a look; False where somebody has said it already.
        **options: keys of `describe_options(name)`. A null value takes the default, except where
            null has a meaning of its own (`clip_low`, `dual_clip`, `h_ini`). A key only other
            algorithms read is ignored with a warning.

    Raises:
        ValueError: unknown name or key (with the nearest one), illegal or missing value; all
        violations at once.
    """
    cls = algorithm_class(name)
    foreign = foreign_keys(name)
    for key in sorted(foreign & set(options)) if warn else ():
        logger.warning("%s does not read the option %r; it is ignored", name, key)
    parsed = parse(
        cls.Options,
        {key: value for key, value in options.items() if key not in foreign},
        name,
        warn=warn,
    )
    penalty = parse_kl(kl, getattr(parsed, "kl_coef", 0.0), name)
    return cls(
        parsed, correction=parse_correction(correction), kl=penalty, entropy_coef=entropy_coef
    )


@cache
def algorithm_of_file(path: str) -> str:
    """Runs a Python file that registers one algorithm (`register_algorithm`); the name it has then.

    Its module is in `sys.modules`, under a name that other processes cannot import: what sends the
    algorithm to them sends the class by value.

    Raises:
        ValueError: the file cannot be run, or registers no algorithm or several.
    """
    before = set(algorithm_names())
    name = f"openrlhf_ext_own_{Path(path).stem}"
    if Path(path).suffix != ".py":
        raise ValueError(f"{path} must be a .py file")
    try:
        import_file(name, path)
    except Exception as error:
        raise ValueError(f"{path} cannot be imported:\n{told(error)}") from error
    new = sorted(set(algorithm_names()) - before)
    if len(new) != 1:
        raise ValueError(
            f"{path} must register one algorithm with register_algorithm, got "
            f"{', '.join(new) or 'none'}"
        )
    return new[0]
