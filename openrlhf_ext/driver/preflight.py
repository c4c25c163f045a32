"""What only other rooms than the configuration know, checked before Ray starts: algorithms, models,
users' files."""

from __future__ import annotations

import logging
import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf_ext.config import ConfigError, Findings, RunConfig, Violation
from openrlhf_ext.config.estimator import (
    algorithm_name,
    algorithm_options,
    engine_entropies,
    flag_options,
)
from openrlhf_ext.config.exact_rules import EXACT
from openrlhf_ext.config.files import dataset_refs, has_weights, inputs_of, is_hub_name
from openrlhf_ext.config.model_rules import cpu_engine_violations, local_shape, model_violations
from openrlhf_ext.config.records import open_source
from openrlhf_ext.config.rules import RESERVED_KEYS
from openrlhf_ext.config.tokenizers import tokenizer_fault
from openrlhf_ext.driver.trials import Tried, try_user_code
from openrlhf_ext.exact import limits
from openrlhf_ext.inputs import InputError, reading
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape, read_value_shape
from openrlhf_ext.options import Fault, no_effect, read, value_of
from openrlhf_ext.options.sections.algo import CUSTOM
from openrlhf_ext.run import checkpoints, corridor
from openrlhf_ext.run.preflight import (
    gpus_here,
    kernel_violations,
    trained_model,
    unseen_inputs,
)

logger = logging.getLogger(__name__)

# a run of one rank and one engine starts with 8 MiB and 256 open files, and does
_SHARED, _SHARED_MIB = "/dev/shm", 4
_OPEN_FILES = 192  # not with none and 64


def findings(config: RunConfig) -> Findings:
    """For ``load_config(more_rules=...)``: the estimator's own options, and whether the models'
    files can be loaded."""
    if unusable := own_algorithm_problems(config):
        return Findings((*unusable, *checkpoint_violations(config), *machine_violations()), ())
    options = option_findings(config)
    of_machine = [
        *exact_violations(config),
        *engine_violations(config),
        *kernel_violations(config),
    ]
    asks = config.dry_run or config.dry_run_json  # of a run that may be on another machine
    violations = [
        *options.violations,
        *correction_violations(config),
        *kl_violations(config),
        *loss_violations(config),
        *old_logprob_violations(config),
        *checkpoint_violations(config),
        *guide_violations(config),
        *machine_violations(),
        *([] if asks else of_machine),
        *corridor.violations(config),
    ]
    warnings = (
        *unread_warnings(config),
        *transport_warnings(config),
        *(f"on this machine, {violation.message}" for violation in of_machine if asks),
        *options.warnings,
    )
    return Findings(tuple(violations), warnings)


def check_downloaded(config: RunConfig) -> None:
    """The rules about models that :func:`load_config` could not apply to a hub name. Raises
    ConfigError: lists every violation."""
    rules = (
        model_violations,
        checkpoint_violations,
        guide_violations,
        exact_violations,
        engine_violations,
        kernel_violations,
    )
    _require([violation for rule in rules for violation in rule(config)])


def check_hub_data(config: RunConfig) -> None:
    """Downloads data sets that are hub names, which the run reads afterwards. Raises ConfigError:
    lists those that cannot be had, or have no such split."""
    violations = []
    for option in config.data_options:
        split = config.data.prompt_split if option.startswith("data.") else config.eval.split
        for ref in dataset_refs(inputs_of(config, option)):
            try:
                if is_hub_name(ref.path):
                    open_source(ref, split)
            except InputError as error:
                said = (
                    f"{option}: {error} (a file, or a data set that was downloaded before, needs "
                    "no network)"
                )
                violations.append(Violation((option,), said))
    _require(violations)


def prompts_fingerprint(config: RunConfig) -> dict[str, str]:
    """Of the prompts, where model and data are here, read as the run reads them: warns of what it
    warns of. Raises
    ConfigError: the run would refuse them."""
    folder = config.actor.model_name_or_path or ""
    there = os.path.isdir(folder) and tokenizer_fault(folder, chat=False) is None
    if not there or config.data.prompt_dataset is None or unseen_inputs(config):
        return {}
    from openrlhf_ext.compat import quiet_upstream_logs
    from openrlhf_ext.driver.data import OverlongPromptError, load_data, open_tokenizer

    if not config.logger.verbose:
        quiet_upstream_logs()
    try:
        with reading(Path(folder) / "config.json", "by transformers"):
            tokenizer = open_tokenizer(config)
        return {"prompts": load_data(config, tokenizer)[0].fingerprint}
    except (InputError, OverlongPromptError, ValueError) as error:
        raise ConfigError(
            [Violation(("data.prompt_dataset",), f"data.prompt_dataset: {error}")]
        ) from error


def tried(config: RunConfig) -> tuple[list[Tried], list[str]]:
    """What came out of the user's own files, and what a run that goes on says. Raises ConfigError:
    lists all faults."""
    trials: list[Tried] = []
    prompts: dict[str, str] = {}
    faults: list[Violation] = []
    try:
        trials = try_user_code(config)
    except ConfigError as error:
        faults += error.violations
    try:
        prompts = prompts_fingerprint(config)
    except ConfigError as error:
        faults += error.violations
    try:
        lines = checkpoints.check_resume(config, trained_models(config), prompts)
    except ConfigError as error:
        faults += error.violations
    _require(faults)
    return trials, lines


def trained_models(config: RunConfig) -> dict[str, dict[str, Any]]:
    """What a checkpoint has to say of policy and critic to be theirs (``model_faults``), nothing of
    one not here."""
    models = {"policy": trained_model(config)}
    if config.has_critic:
        models["critic"] = {}
        critic = config.critic_model or ""
        if os.path.isdir(critic):
            shape = read_value_shape(critic, config.ds.value_head_prefix)
            models["critic"] = {
                "shape": asdict(shape),
                "param_dtype": config.critic_megatron.param_dtype,
            }
    return models


# ---- the estimator


def own_algorithm_problems(config: RunConfig) -> list[Violation]:
    """Why there is no algorithm to check: the file of the estimator custom is not there, or
    registers none."""
    option, path = "algo.module_path", config.algo.module_path
    if config.algo.advantage.estimator != CUSTOM:
        return []
    if path is None:
        message = (
            f"{option} is required with algo.advantage.estimator custom: a .py file that "
            "registers an algorithm (docs/algorithms.md, Your own algorithm)"
        )
        return [Violation((option, "algo.advantage.estimator"), message)]
    if not (path.endswith(".py") and os.path.isfile(path)):
        return [Violation((option,), f"{option} must be an existing .py file: got {path}")]
    try:
        algorithm_name(config)
    except ValueError as error:
        return [Violation((option,), f"{option}: {error}")]
    return []


def option_findings(config: RunConfig) -> Findings:
    """The estimator takes its options, apart from those that other rules are about."""
    from openrlhf_ext.algorithms.registry import algorithm_class

    name, options, _ = algorithm_options(config)
    own = config.own_options
    # what is wrong with flags their own rules say
    of_flags = config.reward.overlong_buffer_len is not None or any(
        config.reward.length_penalty.broken()
    )
    made_of_flags = {"length_penalty"} if of_flags and "length_penalty" not in own else set()
    given = {
        key: value
        for key, value in options.items()
        if key not in RESERVED_KEYS.keys() | made_of_flags
    }
    found = read(algorithm_class(name).Options, given)
    section = f"algo.{config.algo.advantage.estimator}"
    if isinstance(found, list):
        return Findings(tuple(_fault_violation(section, fault, config) for fault in found), ())
    violations = [
        Violation(
            tuple(f"{section}.{key}" for key in violation.options),
            f"{section}: {violation.message}",
        )
        for violation in found.violations()
    ]
    return Findings(
        tuple(violations), tuple(f"{section}: {caution}" for caution in found.cautions())
    )


def _fault_violation(section: str, fault: Fault, config: RunConfig) -> Violation:
    """A value that an option of the estimator does not take, with the place where it was given."""
    name = f"{section}.{fault.name}"
    parent = name.rpartition(".")[0]
    origin = f" ({config.sources[name]})" if name in config.sources else ""
    text = (
        f"{parent}: {fault.problem}{origin}" if fault.unknown else f"{name}{fault.problem}{origin}"
    )
    return Violation((name,), f"{text}; {fault.hint}" if fault.hint else text)


def correction_violations(config: RunConfig) -> Iterator[Violation]:
    """The importance correction is one that exists."""
    from openrlhf_ext.algorithms.importance import Correction

    advantage, prefix = config.algo.advantage, "algo.advantage.is_correction_"
    found = read(
        Correction,
        {
            "level": config.correction_level,
            "mode": config.correction_mode,
            "gating": advantage.is_correction_gating,
            "threshold": config.correction_threshold,
        },
    )
    if isinstance(found, list):
        for fault in found:
            yield Violation(
                (prefix + fault.name,),
                f"{prefix}{fault.name}{fault.problem}; a single value is HIGH",
            )
    else:
        for violation in found.violations():
            yield Violation(
                tuple(prefix + leaf for leaf in violation.options), prefix + violation.message
            )


def kl_violations(config: RunConfig) -> Iterator[Violation]:
    """The KL penalty of ``algo.kl.*`` is one that exists and acts where the estimator defines
    one."""
    from openrlhf_ext.algorithms.kl import KLPenalty
    from openrlhf_ext.algorithms.registry import algorithm_class

    estimator, kl = config.algo.advantage.estimator, config.algo.kl
    name, options, _ = algorithm_options(config)
    if "kl" not in options:
        return
    penalty = KLPenalty(**options["kl"])
    for violation in penalty.violations():
        yield Violation(
            ("algo.kl.unbiased_gradient", "algo.kl.use_loss"),
            f"algo.kl.{violation.message}; add algo.kl.use_loss or leave it out",
        )
    legal = algorithm_class(name).kl_places
    if penalty.place in legal:
        return
    remedy = "set algo.kl.init_coef 0"
    if legal:
        remedy = f"{'add' if 'loss' in legal else 'leave out'} algo.kl.use_loss, or {remedy}"
    yield Violation(
        ("algo.kl.init_coef", "algo.kl.use_loss", "algo.advantage.estimator"),
        f"algo.advantage.estimator {estimator} "
        f"{'supports a KL penalty only in the ' + legal[0] if legal else 'does not support a KL penalty'}: "
        f"got algo.kl.init_coef {kl.init_coef:g} and algo.kl.use_loss {str(kl.use_loss).lower()}; "
        f"{remedy}",
    )


def loss_violations(config: RunConfig) -> Iterator[Violation]:
    """A loss that was asked for is one that the estimator has."""
    from openrlhf_ext.algorithms.registry import option_keys

    estimator = config.algo.advantage.estimator
    if config.actor.policy_loss_type == "gspo" and "policy_loss_type" not in option_keys(
        algorithm_name(config)
    ):
        yield Violation(
            ("actor.policy_loss_type", "algo.advantage.estimator"),
            "actor.policy_loss_type gspo is for OpenRLHF's own estimators: got "
            f"algo.advantage.estimator {estimator}, which has its own loss; use "
            "algo.advantage.estimator gspo, group_norm or reinforce_baseline",
        )


def old_logprob_violations(config: RunConfig) -> Iterator[Violation]:
    """The engines' log-probs can be the old ones only of the whole distribution, and of methods
    that need no more."""
    from openrlhf_ext.algorithms.registry import algorithm_class

    yield from _entropy_violations(config)
    if config.algo.old_logprobs != "engine":
        return
    estimator, method = config.algo.advantage.estimator, algorithm_class(algorithm_name(config))
    penalty = algorithm_options(config)[1].get("kl")
    by_policy = "entropies" in method.needs and not engine_entropies(config)
    exact = config.train.exact_rollout_enable
    needs = [
        (
            config.rollout.top_p < 1,
            "rollout.top_p",
            f"{config.rollout.top_p:g}",
            "they come from the truncated distribution",
        ),
        (
            config.correction_level != "off",
            "algo.advantage.is_correction_level",
            config.correction_level,
            "ratios already use the engines' log-probs, and a correction would compare these with "
            "themselves",
        ),
        (
            by_policy,
            "algo.entropies",
            "policy",
            f"{estimator} needs a forward pass of the policy for its entropies",
        ),
        (
            method.needs_prepare and not (exact and config.max_staleness == 0),
            "algo.advantage.estimator",
            estimator,
            "it chooses tokens by the policy's log-probs",
        ),
        (
            penalty is not None and penalty["place"] == "reward" and not exact,
            "algo.kl.init_coef",
            f"{config.algo.kl.init_coef:g}",
            "a KL penalty in the reward uses the policy's log-probs",
        ),
        (
            config.has_critic,
            "algo.advantage.estimator",
            estimator,
            "it does not train the policy in its first steps",
        ),
        (
            config.train.drift_check,
            "train.drift_check",
            "true",
            "it compares the policy's log-probs",
        ),
        (
            config.train.routing_replay == "policy",
            "train.routing_replay",
            "policy",
            "it replays the policy's forward pass",
        ),
    ]
    for wrong, name, value, why in needs:
        if wrong:
            yield Violation(
                ("algo.old_logprobs", name),
                f"algo.old_logprobs engine does not work with {name} {value}: {why}; use "
                "algo.old_logprobs auto",
            )


def _entropy_violations(config: RunConfig) -> Iterator[Violation]:
    if not engine_entropies(config):
        return
    for wrong, name, value, why in (
        (
            config.rollout.top_p < 1,
            "rollout.top_p",
            f"{config.rollout.top_p:g}",
            "they come from the truncated distribution",
        ),
        (
            config.train.agent_func_path is not None,
            "train.agent_func_path",
            config.train.agent_func_path,
            "responses of agents have no entropies",
        ),
    ):
        if wrong:
            yield Violation(
                ("algo.entropies", name),
                f"algo.entropies engine does not work with {name} {value}: {why}; use "
                "algo.entropies policy",
            )


def unread_warnings(config: RunConfig) -> Iterator[str]:
    """Options that only other estimators read: in the estimator's map, or set by OpenRLHF's
    flags."""
    from openrlhf_ext.algorithms.registry import algorithm_names, foreign_keys, option_keys

    estimator = config.algo.advantage.estimator
    foreign = foreign_keys(algorithm_name(config))
    reason = f"algo.advantage.estimator {estimator} does not read"
    if config.algo.entropies == "engine" and not engine_entropies(config):
        yield no_effect(
            "algo.entropies",
            "engine",
            f"algo.advantage.estimator {estimator} uses no entropies",
        )
    for key, value in config.own_options.items():
        if key in foreign and value is not None:
            owners = ", ".join(other for other in algorithm_names() if key in option_keys(other))
            yield no_effect(
                f"algo.{estimator}.{key}", value, f"{reason} it: it is an option of {owners}"
            )
    for flag in flag_options(config):
        if flag.key in foreign:
            yield no_effect(flag.flag, flag.value, f"{reason} {flag.key}")


def transport_warnings(config: RunConfig) -> Iterator[str]:
    """A transport that needs GPUs, where this machine has none: a run here would end, one on other
    nodes may not."""
    if config.vllm.sync_backend in ("nccl", "cuda_ipc") and not gpus_here():
        yield (
            f"vllm.sync_backend {config.vllm.sync_backend} needs GPUs, but this machine has none: "
            "the nodes of the run must have them; auto uses gloo without GPUs"
        )


def _starts_here() -> bool:
    """Whether processes start on this machine, not on a cluster that is joined."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


def exact_violations(config: RunConfig) -> Iterator[Violation]:
    """Exact mode has the vLLM that it was written for, and on a CPU a processor and a length for
    which its kernels compute the same in a prompt as in a generation."""
    if not config.train.exact_rollout_enable:
        return
    if (problem := limits.vllm_problem()) is not None:
        yield Violation((EXACT,), f"{EXACT}: {problem}; install that release, or leave {EXACT} out")
    if gpus_here() or not _starts_here():
        return
    if (problem := limits.processor_problem()) is not None:
        yield Violation((EXACT,), f"{EXACT}: {problem}; leave it out, or use another machine")
        return
    shape, _ = local_shape("actor.model_name_or_path", config.actor.model_name_or_path)
    if shape is None:
        return  # not downloaded yet, or reported by other rules
    size = 2 if config.megatron.param_dtype == "bf16" else 4
    longest = limits.longest_sequence(size, shape.head_dim)
    if config.data.max_len > longest:
        yield Violation(
            ("data.max_len", EXACT),
            f"data.max_len must be at most {longest} tokens with {EXACT} on this CPU, because "
            "vLLM's attention cuts longer sequences into tiles of keys, at other places in a "
            f"prompt than in a generation: got {config.data.max_len}; lower it, or leave {EXACT} "
            "out",
        )


def engine_violations(config: RunConfig) -> Iterator[Violation]:
    """What vLLM's CPU build lacks, if engines start here without a GPU."""
    if _starts_here() and not gpus_here():
        yield from cpu_engine_violations(config)


def machine_violations() -> Iterator[Violation]:
    """This machine has what the processes of the smallest run need, if they start here: room for
    semaphores, and open files; libraries do not say which of them they lack."""
    if not _starts_here():
        return
    free = shutil.disk_usage(_SHARED).free >> 20 if os.path.isdir(_SHARED) else _SHARED_MIB
    if free < _SHARED_MIB:
        yield Violation(
            (),
            f"{_SHARED} must have {_SHARED_MIB} MiB free for data that processes share, but only "
            f"{free} MiB are free: delete files that ended programs left, or make it larger "
            f"(mount -o remount,size=8g {_SHARED}; a container's --shm-size 8g)",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES:
        yield Violation(
            (),
            f"a process must be allowed {_OPEN_FILES} open files, more with many ranks and "
            f"engines: the limit is {soft}; raise it (ulimit -n 4096; without an administrator up "
            f"to {hard})",
        )


# ---- models


def checkpoint_violations(config: RunConfig) -> Iterator[Violation]:
    """Policy, critic, reward model and guide are models that are built, and their files hold their
    tensors."""
    for option in config.model_options:
        folder = value_of(config, option)
        value_head = (
            config.ds.value_head_prefix if option.startswith(("critic.", "reward.")) else None
        )
        if folder is None or not os.path.isdir(folder):
            continue
        try:
            shape = (
                read_model_shape(folder)
                if value_head is None
                else read_value_shape(folder, value_head)
            )
        except InputError:
            continue  # reported by the configuration's own rules
        if not (config.dry_run or config.dry_run_json or has_weights(folder)):
            yield Violation(
                (option,),
                f"{option}: {folder} holds no *.safetensors file, which a run loads; save the "
                "model's weights there (save_pretrained), or use --dry_run, which needs none",
            )
            continue
        try:
            check_files(folder, shape, trained_head=option.startswith("reward."))
        except InputError as error:
            yield Violation((option,), f"{option}: {error}")


def guide_violations(config: RunConfig) -> Iterator[Violation]:
    """A guide that takes the policy's place for a forward pass differs from it in nothing but its
    weights."""
    folders = [
        folder
        for folder in (config.guide.model_name_or_path, config.actor.model_name_or_path)
        if folder
    ]
    if not config.has_guide or config.guide_ranks or len([*filter(os.path.isdir, folders)]) < 2:
        return
    try:
        guide, policy = (asdict(read_model_shape(folder)) for folder in folders)
    except InputError:
        return  # reported by other rules
    names = [
        name
        for name in guide
        if guide[name] != policy[name] and name not in ("max_positions", "window")
    ]
    if names:
        different = ", ".join(f"{name} {guide[name]} and {policy[name]}" for name in names)
        yield Violation(
            ("guide.model_name_or_path", "guide.num_gpus_per_node", "actor.model_name_or_path"),
            "guide.model_name_or_path must have the architecture of actor.model_name_or_path, "
            f"because its weights replace the policy's for a forward pass: got {different}; give "
            "the guide ranks of its own (guide.num_gpus_per_node)",
        )


def check_files(folder: str, shape: ModelShape, trained_head: bool = False) -> None:
    """The files of a model hold its tensors, a critic's value head apart unless it has to be a
    ``trained_head``, or InputError says what does not fit; a folder without weights is warned about
    only."""
    from openrlhf_ext.megatron.model.hf_files import (
        HFCheckpoint,
        describe,
        require_value_head,
        unaccounted_tensors,
    )

    if not has_weights(folder):
        return
    checkpoint = HFCheckpoint(folder)
    if trained_head:
        require_value_head(shape, checkpoint)
    if problems := unaccounted_tensors(checkpoint, shape):
        raise InputError(f"{folder}: {describe(problems)}")


def _require(violations: Iterable[Violation]) -> None:
    if found := list(violations):
        raise ConfigError(found)
