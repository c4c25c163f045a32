"""``openrlhf-ext plan --config FILE [--section.name value] [--gpus N] [--gpu H100]``: what fits.

Ranks the layouts of a run on N GPUs by the predicted seconds of a step, from the model's config.json
alone, and shows memory per rank, seconds per phase, every assumption, and the bottleneck. Downloads
nothing and needs no GPU. All other words are options of a run; data and reward are not needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_ext.cli.main import CommandParser, positive, show, silence_libraries
from openrlhf_ext.config import ConfigError, RunConfig, load_config, value_of
from openrlhf_ext.config.show import modeline
from openrlhf_ext.inputs import InputError
from openrlhf_ext.options import nest
from openrlhf_ext.options.sections import Megatron
from openrlhf_ext.outputs import aligned, write_text

if TYPE_CHECKING:
    from openrlhf_ext.megatron.layout import ParallelLayout
    from openrlhf_ext.planning.candidate import Candidate
    from openrlhf_ext.planning.search import Planner
    from openrlhf_ext.planning.seconds import Assumptions

_GIB = 1 << 30
_SHOWN = 10
_FROM = "--from"
_NO_GAIN = 0.99  # of the seconds of a step
_SLEEP = (
    "train.colocate_all",
    "ds.enable_sleep",
    "vllm.enable_sleep",
    "train.dynamic_batch_enable",
)
_GROUP, _USUAL_GROUP = "rollout.n_samples_per_prompt", 8
_ESTIMATOR, _USUAL_ESTIMATOR = "algo.advantage.estimator", "grpo"


def main(argv: list[str] | None = None) -> int:
    """0; 2 if nothing fits, or the arguments or the configuration are wrong."""
    silence_libraries()
    argv = sys.argv[1:] if argv is None else argv
    if _FROM in argv:
        return _translate(argv[: argv.index(_FROM)], argv[argv.index(_FROM) + 1 :])
    arguments, words = _parse(argv)
    from openrlhf_ext.planning.candidate import PlanError
    from openrlhf_ext.planning.search import Planner
    from openrlhf_ext.planning.seconds import card

    try:
        config = _load(words)
        gpu = card(arguments.gpu) or arguments.gpu
        lengths = arguments.response_tokens, arguments.prompt_tokens
        planner = Planner(config, gpu, *lengths, _assumed(config, arguments.accepted))
        gpus = arguments.gpus or planner.config.gpus
        found = planner.candidates(gpus)
    except (ConfigError, InputError, PlanError) as error:
        show(error, file=sys.stderr)
        return 2
    if not found or found[0].seconds is None:
        show(_nothing_fits(planner, found, gpus), file=sys.stderr)
        return 2
    if arguments.json:
        write_text(Path(arguments.json), json.dumps(as_json(planner, found, gpus), indent=1) + "\n")
    show("\n".join(plan_lines(planner, found, gpus)))
    if arguments.write:
        file = Path(arguments.write)
        write_text(file, modeline(file) + layout_file(planner, found[0], gpus, argv))
        show(f"\nwritten: {arguments.write}; openrlhf-ext train --config RECIPE --config it")
    return 0


def _translate(ahead: list[str], words: list[str]) -> int:
    """``words``: the project and its own options, which may be called like ours."""
    from openrlhf_ext.tools.plan.translate import translate

    parser = CommandParser(
        "plan --from", "Prints the YAML for a run of another project (docs/migration.md)."
    )
    parser.add_argument(
        "--gpus", type=positive, help="for a run of TRL (1), which leaves them to its launcher"
    )
    try:
        print(translate(words, parser.parse_args(ahead).gpus), end="")
    except InputError as error:
        show(error, file=sys.stderr)
        return 2
    return 0


def _load(words: list[str]) -> RunConfig:
    """The run's configuration. An estimator that it lacks is one without a critic, a group size the
    usual one, and both are said."""
    from openrlhf_ext.planning.search import CHOSEN

    usual = {_ESTIMATOR: _USUAL_ESTIMATOR}
    try:
        config = load_config(words, files=False, chosen=CHOSEN, defaults=usual)
    except ConfigError as error:
        if not any(_GROUP in violation.options for violation in error.violations):
            raise
        config = load_config(
            words, files=False, chosen=CHOSEN, defaults=usual | {_GROUP: _USUAL_GROUP}
        )
    for option, value, why in (
        (_ESTIMATOR, _USUAL_ESTIMATOR, "a run then trains a critic too, by gae"),
        (
            _GROUP,
            _USUAL_GROUP,
            f"{config.algo.advantage.estimator} compares the responses to one prompt",
        ),
    ):
        if config.sources.get(option) == "default":
            show(f"{option} is not set ({why}): planned with {value}\n")
    return config


def _assumed(config: RunConfig, accepted: float | None) -> Assumptions:
    """With the acceptance of drafts, which no model tells. Raises PlanError."""
    from openrlhf_ext.planning.candidate import PlanError
    from openrlhf_ext.planning.seconds import Assumptions

    drafts = config.vllm.speculative
    if drafts.method == "none":
        if accepted is not None:
            raise PlanError(
                f"--accepted is of drafts: got {accepted:g} and vllm.speculative.method none; set "
                "the method, or leave --accepted out"
            )
        return Assumptions()
    if accepted is None or not 0 <= accepted <= drafts.num_tokens:
        raise PlanError(
            f"--accepted must be from 0 to vllm.speculative.num_tokens = {drafts.num_tokens} with "
            f"vllm.speculative.method {drafts.method}: got {'none' if accepted is None else accepted}"
            "; give rollout/accepted of a run with these drafts"
        )
    return Assumptions(accepted=accepted)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser("plan", (__doc__ or "").split("\n\n")[1], takes_run_options=True)
    parser.add_argument(
        "--gpus", type=positive, help="GPUs, engines included (default: as many as configured)"
    )
    parser.add_argument(
        "--gpu", default="H100", help="A100, A100-40, H100 (default), H200, B200, ..."
    )
    parser.add_argument(
        "--response_tokens", type=positive, help="mean (default: 0.6 of rollout.max_new_tokens)"
    )
    parser.add_argument(
        "--prompt_tokens",
        type=positive,
        help="mean (default: data.max_len - rollout.max_new_tokens, at most 512)",
    )
    parser.add_argument(
        "--accepted",
        type=float,
        help="with vllm.speculative.method: mean tokens of a draft that are accepted, as "
        "rollout/accepted of a run",
    )
    parser.add_argument(
        "--write", metavar="LAYOUT.yaml", help="the best layout, for train_ppo_ray --config"
    )
    parser.add_argument("--json", metavar="OUT", help="the plan for programs")
    parser.add_argument(
        _FROM,
        action="store_true",
        help="plan nothing: print the YAML for a run of verl or trl: the project and its own "
        "options or YAML file follow this option; in one of their scripts, it replaces the "
        "start of their trainer (docs/migration.md)",
    )
    return parser.parse_known_args(argv)


# ---- as text


def plan_lines(planner: Planner, found: Sequence[Candidate], gpus: int) -> Iterator[str]:
    best, error = found[0], planner.clock.error
    kind = "mixtures of experts" if planner.shape.is_mixture else "dense models"
    yield from _head(planner, gpus)
    yield ""
    yield from _ranking(planner, found, gpus)
    yield from _given(planner)
    yield ""
    yield from _levers(planner, best, gpus)
    yield ""
    yield from _memory(planner, best)
    yield ""
    yield (
        f"accuracy of the seconds: of {error.rows} steps of {kind} that others published, half are "
        f"within a factor of {error.median:.2f}, the worst by {error.worst:.2f} (predicted / "
        f"published {error.low:.2f} to {error.high:.2f}); weight syncs of others took up to thirty "
        "times as long (docs/scaling.md)"
    )
    yield ""
    yield (
        "assumptions (some fitted to seconds that others published, nothing measured on a GPU "
        "here):"
    )
    yield from (f"  {line}" for line in planner.clock.lines())
    if (drafts := planner.config.vllm.speculative).method != "none":
        yield (
            f"  drafts of {drafts.num_tokens} tokens ({drafts.method}), of which "
            f"{planner.assumed.accepted:g} are accepted (--accepted); a decoding step multiplies "
            "every weight for all of them, and reads a head once for each (not compared with "
            "published steps)"
        )
    per_node = planner.config.actor.num_gpus_per_node
    yield (
        f"  nodes of {per_node} GPUs (actor.num_gpus_per_node: set it if they have more than the "
        "policy uses)"
    )
    if planner.config.has_critic:
        turns = planner.config.train.colocate_all  # driver/loop.py, ``train``
        where = "on the policy's GPUs, one after the other" if turns else "beside the policy"
        yield f"  log-probs and train: with a critic {where}"
    yield (
        "  memory: flash attention and TransformerEngine's layers; the sequences of a micro-batch "
        "fill its budget"
    )
    yield ""
    yield f"bottleneck: {best.binding}."


def _head(planner: Planner, gpus: int) -> Iterator[str]:
    work, shape = planner.work, planner.shape
    flops = work.forward(shape)
    active = f" ({planner.clock.active:,} of them for a token)" if shape.is_mixture else ""
    yield (
        f"{planner.config.actor.model_name_or_path}: {planner.parameters:,} parameters{active}, "
        f"on {gpus} {planner.gpu_name} of {planner.clock.gpu.memory / _GIB:.1f} GiB"
    )
    token, product = work.length, 1e9 * work.length
    yield (
        f"FLOPs per token, sequences of {token} tokens: {flops.total / product:.1f} GFLOP "
        f"forward (layers {flops.layers / product:.1f}, attention "
        f"{flops.attention / product:.1f}, head {flops.head / product:.1f}), "
        f"{flops.training / product:.1f} forward and backward"
    )


def _ranking(planner: Planner, found: Sequence[Candidate], gpus: int) -> Iterator[str]:
    from openrlhf_ext.planning.candidate import ALIKE

    fitting = [candidate for candidate in found if candidate.seconds]
    shown = _distinct(fitting)[:_SHOWN]
    yield (
        f"{len(fitting)} of {len(found)} layouts that the rules allow fit; the fastest, one for "
        "every way to split the policy (seconds of a step, GiB of the fullest GPU). Steps within "
        f"{ALIKE:.0%} count as equal: then the layout with fewer ranks per copy comes first, then "
        "the one that needs less memory:"
    )
    header = (
        "",
        "TP",
        "PP",
        "VP",
        "CP",
        *(["EP"] if planner.shape.is_mixture else []),
        "DP",
        "recompute",
        "tokens",
        "engines",
        "share",
        "training",
        "sampling",
        "rollout",
        "log-probs",
        "train",
        "sync",
        "step s",
    )
    rows = [(str(number), *_row(candidate)) for number, candidate in enumerate(shown, 1)]
    own = (
        [("now", *_row(planner.as_configured()))]
        if planner.config.gpus == gpus and planner.is_allowed
        else []
    )
    yield from (f"  {line}" for line in aligned([header, *rows, *own]))
    head = planner.clock.head_layers(shown[0].policy)
    if planner.shape.is_mixture:
        yield "  EP: ranks that the experts of a layer are distributed over;"
    yield (
        "  PP: stages, and the layers of the first, one between and the last where they differ: "
        "the last holds the head,\n  which in the first of these rows takes as long as "
        f"{head:.1f} layers; tokens: of a micro-batch on one GPU;\n  engines: number x GPUs of "
        "each; share: of a GPU for its engine (vllm.gpu_memory_utilization, searched\n  where "
        f"none is set){'; now: the layout as configured' * len(own)}"
    )


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best for every way to cut the policy."""
    best: dict[ParallelLayout, Candidate] = {}
    for candidate in candidates:
        best.setdefault(candidate.policy.layout, candidate)
    return list(best.values())


def _disk(planner: Planner) -> dict[str, int]:
    from openrlhf_ext.planning.memory import checkpoints

    return checkpoints(planner.config, planner.parameters, planner.adapters)


def _given(planner: Planner) -> Iterator[str]:
    """What became of sizes that the run gives, and of options that mean something else here."""
    if planner.kept:
        yield (
            "  kept, as given: "
            f"{', '.join(f'{name} {value}' for name, value in planner.kept.items())}"
        )
    if replaced := [f"{name} {value}" for name, value in planner.replaced.items()]:
        yield (
            "  not used, because plan chooses them unless the command line gives them: "
            f"{', '.join(replaced)}"
        )
    yield from (
        f"  - {line}"
        for line in planner.config.warnings
        if not line.startswith(("eval.", "data.", "logger."))
    )


def _levers(planner: Planner, best: Candidate, gpus: int) -> Iterator[str]:
    now = "nothing fits" if best.seconds is None else f"{best.seconds.step:.0f} s"
    yield (
        f"what may help, by a coarse search of each: plan with it for its best layout (now: {now}):"
    )
    found = planner.levers(gpus, best.policy.layout.context_parallel_size)
    for what, one in sorted(
        found, key=lambda pair: (pair[1].seconds.step if pair[1].seconds else 1e9, pair[1].short)
    ):
        if one.seconds is None:
            said = f"{one.short / _GIB:.1f} GiB short"
        else:
            gains = best.seconds is None or one.seconds.step <= _NO_GAIN * best.seconds.step
            said = f"{'fits' if gains else 'no gain'}, {one.seconds.step:.0f} s a step"
        yield f"  {said:<20}  {what}"


def _row(candidate: Candidate) -> tuple[str, ...]:
    policy, engines, seconds = candidate.policy, candidate.engines, candidate.seconds
    layout, megatron = policy.layout, policy.megatron
    selective = megatron.recompute_modules if megatron.recompute == "selective" else ()
    mode = " ".join((megatron.recompute, *selective))
    peaks = {moment.doing: f"{moment.total / _GIB:.1f}" for moment in candidate.moments}
    times = ["does not fit", "", "", "", ""]
    if seconds is not None:
        s = seconds
        times = [
            f"{value:.0f}" for value in (s.rollout, s.logprobs, s.train, s.sync + s.moves, s.step)
        ]
    degrees = (
        layout.tensor_parallel_size,
        _stages(candidate),
        layout.virtual_pipeline_size,
        layout.context_parallel_size,
        *([layout.expert_parallel_size] if policy.shape.is_mixture else []),
        layout.data_parallel_size,
    )
    tokens, own = "-" if policy.budget is None else str(policy.budget), f"{candidate.share:g}"
    of_engines = f"{engines.count} x {engines.tensor_parallel_size}"
    return (
        *map(str, degrees),
        mode,
        tokens,
        of_engines,
        own,
        peaks["training"],
        peaks["sampling"],
        *times,
    )


def _stages(candidate: Candidate) -> str:
    """Pipeline stages, with the layers of the first, of one between and of the last where they are
    not all alike."""
    layers = candidate.policy.layers
    shown = [*layers[:2], layers[-1]] if len(layers) > 2 else layers
    return (
        f"{len(layers)} ({'-'.join(map(str, shown))})" if len(set(layers)) > 1 else str(len(layers))
    )


def _memory(planner: Planner, best: Candidate) -> Iterator[str]:
    yield f"memory of the first layout, GiB of {planner.clock.gpu.memory / _GIB:.1f}:"
    for moment in best.moments:
        yield f"  while {moment.doing}, the fullest GPU: {moment.total / _GIB:.1f}"
        yield from _parts(moment.parts)
    module = planner.shape.mlp.recompute_module
    mlp = Megatron(recompute="selective", recompute_modules=(module,))
    modes = {"none": Megatron(), f"selective: {module}": mlp, "full": Megatron(recompute="full")}
    modes_text = ", ".join(
        f"{name} {best.policy.activations(0, mode) / _GIB:.1f}" for name, mode in modes.items()
    )
    yield f"  activations of the first stage by megatron.recompute: {modes_text}"
    first, last = best.policy.states[0], best.policy.states[-1]
    yield (
        f"  parameters on a rank: {first.parameters:,} of the first stage, {last.parameters:,} of "
        f"the last; an engine processes {best.concurrency} requests at a time"
    )
    yield from _lengths(planner, best)
    for what, parts in (
        ("host memory of a node", best.host),
        ("checkpoints on disk", _disk(planner)),
    ):
        yield f"  {what}: {sum(parts.values()) / _GIB:.1f}"
        yield from _parts(parts)


def _lengths(planner: Planner, best: Candidate) -> Iterator[str]:
    window = planner.shape.max_positions
    found = {"": planner.longest(best)}
    if offload := planner.to_host:
        found[" with ds.adam_offload"] = planner.longest(best, offload)
    lengths = ", ".join(f"{tokens:,} tokens{how}" for how, tokens in found.items())
    yield (
        "  the longest sequence that fits in this layout (data.max_len): "
        f"{lengths}{f'; the window of the model is {window:,}' if window else ''}; other layouts "
        "may fit longer ones: plan with that data.max_len"
    )


def _parts(parts: Mapping[str, int]) -> Iterator[str]:
    for name, size in parts.items():
        yield f"    {size / _GIB:8.2f}  {name}"


def _nothing_fits(planner: Planner, found: Sequence[Candidate], gpus: int) -> str:
    from openrlhf_ext.planning.candidate import SHARE

    lines = [
        f"nothing fits on {gpus} {planner.gpu_name} of {planner.clock.gpu.memory / _GIB:.1f} GiB"
    ]
    if found:
        nearest, moment = found[0], found[0].fullest
        lines.append(
            f"bottleneck: {nearest.binding}; the closest layout ({_degrees(nearest)}) needs:"
        )
        lines += [f"  {moment.total / _GIB:8.2f}  GiB while {moment.doing}", *_parts(moment.parts)]
    elif unmet := [*planner.unmet()]:
        return "\n".join([*lines, *unmet, *_given(planner)])
    else:
        shared = planner.config.engines_share_gpus
        lines.append(
            "no layout of this many GPUs satisfies the rules of the configuration: use whole "
            "nodes, or another number"
            if shared or gpus > 1
            else "policy and engines need a GPU each unless they share them (train.colocate_all)"
        )
    if enough := planner.fewest_gpus():
        lines.append(f"the fewest {planner.gpu_name} that would fit it: {enough}")
    else:
        fixed = planner.config.vllm.gpu_memory_utilization is not None
        share = f"leave {SHARE} out, so that plan chooses it, " if fixed else ""
        lines.append(
            f"more GPUs alone do not help: {share}lower data.max_len, or use GPUs with more memory "
            "(--gpu)"
        )
    lines += _given(planner)
    if found:
        lines += _levers(planner, found[0], gpus)
    return "\n".join(lines)


def _degrees(candidate: Candidate) -> str:
    layout, recompute = candidate.policy.layout, candidate.policy.megatron.recompute
    experts = f"EP {layout.expert_parallel_size}, " if candidate.policy.shape.is_mixture else ""
    return (
        f"TP {layout.tensor_parallel_size}, PP {_stages(candidate)}, CP "
        f"{layout.context_parallel_size}, {experts}recompute {recompute}, {layout.world_size} "
        f"ranks, {candidate.engines.count} engines of {candidate.engines.tensor_parallel_size}, "
        f"vllm.gpu_memory_utilization {candidate.share:g}"
    )


# ---- as files


def layout_file(planner: Planner, best: Candidate, gpus: int, argv: Sequence[str]) -> str:
    """The layout as YAML that ``train_ppo_ray --config`` loads on top of a recipe; ``argv`` made
    it."""
    import yaml

    options = dict(best.options) | {name: value_of(planner.config, name) for name in _SLEEP}
    sections = nest(
        {name: [*value] if isinstance(value, tuple) else value for name, value in options.items()}
    )
    fullest = best.fullest
    return (
        f"# {gpus} {planner.gpu_name}, {planner.parameters:,} parameters, sequences of up to "
        f"{planner.config.data.max_len} tokens; written by\n# openrlhf-ext plan "
        f"{shlex.join(argv)}\n# Predicted, not run: {fullest.total / _GIB:.1f} of "
        f"{planner.clock.gpu.memory / _GIB:.1f} GiB on the fullest GPU, "
        f"{best.seconds.step if best.seconds else 0:.0f} s a step.\n"
        + yaml.safe_dump(sections, sort_keys=True)
    )


def as_json(planner: Planner, found: Sequence[Candidate], gpus: int) -> dict[str, Any]:
    fitting = [candidate for candidate in found if candidate.seconds]
    flops = planner.work.forward(planner.shape)
    return {
        "model": Path(planner.config.actor.model_name_or_path or "").name,
        "parameters": planner.parameters,
        "gpus": gpus,
        "gpu": dataclasses.asdict(planner.clock.gpu) | {"name": planner.gpu_name},
        "workload": dataclasses.asdict(planner.work),
        "assumptions": dataclasses.asdict(planner.assumed),
        "step_error": dataclasses.asdict(planner.clock.error),
        "flops_per_token": {
            "forward": flops.total / planner.work.length,
            "training": flops.training / planner.work.length,
        },
        "allowed": len(found),
        "fitting": len(fitting),
        "disk": _disk(planner),
        "weight_sync_bytes": planner.sent,
        "layouts": [_candidate_json(candidate) for candidate in _distinct(fitting)[:_SHOWN]],
        "configured": _candidate_json(planner.as_configured()) if planner.is_allowed else None,
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    seconds = candidate.seconds
    return {
        "options": dict(candidate.options),
        "memory": {moment.doing: dict(moment.parts) for moment in candidate.moments},
        "parameters": [states.parameters for states in candidate.policy.states],
        "host": dict(candidate.host),
        "concurrency": candidate.concurrency,
        "seconds": None
        if seconds is None
        else dataclasses.asdict(seconds) | {"step": seconds.step},
    }


if __name__ == "__main__":
    sys.exit(main())
