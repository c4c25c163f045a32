"""Nothing is refused that fits by its own sum, and the fewest GPUs are really the fewest: held
against every layout."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from openrlhf_ext.config import RunConfig, load_config
from openrlhf_ext.config.model_rules import shape_violations
from openrlhf_ext.config.rules import RULES
from openrlhf_ext.planning.candidate import SHARE, Candidate, with_options
from openrlhf_ext.planning.memory import Moment, moments
from openrlhf_ext.planning.search import SHARES, SHARING, Planner, balanced_ends
from openrlhf_ext.planning.seconds import GPUS, card
from openrlhf_ext.ranks.shared_gpu import SharedGpu, SharedGpuTooSmall

MODELS = (
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-3B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-32B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-30B-A3B",
)
COUNTS = (1, 2, 4, 6, 8, 16, 24, 64)
GIB = 1 << 30


def planner(model: str, shared: bool, *words: str) -> Planner:
    group = ("--algo.advantage.estimator", "grpo", "--rollout.n_samples_per_prompt", "8")
    found = Planner(load_config(["--actor.model_name_or_path", model, *group, *words], files=False))
    return found.with_(SHARING) if shared else found


def allowed(plan: Planner, config: RunConfig) -> bool:
    broken = [
        *shape_violations(config, plan.shape, "model"),
        *(v for rule in RULES for v in rule(config)),
    ]
    return not broken


def an_engine_fits(plan: Planner, tp: int, share: float) -> bool:
    """Its weights, its sampler, what it computes with, and one of the longest sequences in its
    share."""
    shape = plan.shape
    key_values = 2 * 2 * shape.num_layers * max(1, shape.num_kv_heads // tp) * shape.head_dim
    sampler = 1024 * (4 * shape.vocab_size + shape.vocab_size // 8)
    needed = (
        2 * plan.parameters // tp
        + sampler
        + 4 * GIB
        + key_values * (plan.work.prompt_tokens + plan.work.longest)
    )
    return needed <= int(share * plan.clock.gpu.memory)


def expert_sizes(plan: Planner) -> list[int]:
    """Ranks that experts may be dealt over, none of them cut."""
    return [1, *(ep for ep in (2, 4, 8, 16, 32, 64, 128) if plan.shape.num_experts)]


def fits(plan: Planner, gpus: int) -> bool:
    """Whether any layout does, in plain loops over degrees, recomputation and shares in steps of a
    twentieth."""
    memory, shares = plan.clock.gpu.memory, [twentieths / 20 for twentieths in range(6, 20)]
    for ranks, others in plan._divisions(gpus):
        if ranks > 8 and ranks % 8:
            continue
        nodes = {"actor.num_nodes": max(1, ranks // 8), "actor.num_gpus_per_node": min(8, ranks)}
        engines = [tp for tp in (1, 2, 4, 8) if others % tp == 0 and tp <= min(8, others)]
        recomputes = ({"megatron.recompute": "none"}, {"megatron.recompute": "full"})
        degrees = itertools.product(
            (1, 2, 4, 8), range(1, 17), (1, 2, 4, 8), expert_sizes(plan), recomputes
        )
        for tp, pp, cp, ep, recompute in degrees:
            of_experts = plan.shape.num_layers * plan.shape.mlp.expert_weights
            least = 6 * ((plan.parameters - of_experts) // (tp * pp) + of_experts // (pp * ep))
            cut = plan.shape.num_experts and ep == 1 < tp * cp  # experts, if they are on all ranks
            if ranks % (tp * pp * cp) or ranks // pp % ep or least > memory or cut:
                continue
            # in stages of as many layers, or with a last stage of fewer
            layers = plan.shape.num_layers
            last = next(
                n for n in range(layers // pp, -1, -1) if (layers - n) % max(1, pp - 1) == 0
            )
            layout = (
                nodes
                | recompute
                | {
                    "megatron.tensor_parallel_size": tp,
                    "megatron.sequence_parallel_enable": tp > 1,
                    "megatron.pipeline_parallel_size": pp,
                    "megatron.context_parallel_size": cp,
                    "megatron.decoder_last_pipeline_num_layers": last if layers % pp else None,
                }
            )
            if last == 0:
                continue
            layout |= {"megatron.expert_parallel_size": ep} if plan.shape.num_experts else {}
            base = with_options(plan.config, layout)
            policy = plan.models(base).policy
            for share in shares:
                there = moments(base, plan.sent, {"engine": int(share * memory)}, policy.parts)
                if any(one.total > memory for one in there):
                    break  # a larger one takes more
                for size in (size for size in engines if an_engine_fits(plan, size, share)):
                    words = {
                        "vllm.num_engines": others // size,
                        "vllm.tensor_parallel_size": size,
                        SHARE: share,
                    }
                    if allowed(plan, with_options(base, words)):
                        return True
    return False


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "colocated"])
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_refused_that_fits_and_the_fewest_gpus_are_the_fewest(model: str, shared: bool):
    plan = planner(model, shared)
    by_hand = {gpus: fits(plan, gpus) for gpus in COUNTS}
    for gpus, any_fits in by_hand.items():
        assert plan.fits(gpus) == any_fits, gpus
        if gpus <= 8:  # a whole ranking takes a while
            found = plan.candidates(gpus)
            best = found[0] if found else None
            assert (best is not None and best.seconds is not None) == any_fits, (gpus, best)
        if gpus <= 8 and any_fits:
            assert best.short == 0 and all(
                moment.total <= plan.clock.gpu.memory for moment in best.moments
            )
    fewest = plan.fewest_gpus()
    assert fewest is not None and fits(plan, fewest)
    for fewer in range(1 if fewest <= 8 else 8, fewest, 1 if fewest <= 8 else 8):
        assert not fits(plan, fewer), fewer


@pytest.mark.parametrize("share", [0.3, 0.8, 0.95, 0.97])
@pytest.mark.parametrize("asleep", [True, False])
def test_run_and_plan_refuse_the_same_shared_gpus(share: float, asleep: bool):
    """What a rank checks at its start is the planner's sum without activations, to the byte."""
    plan = planner("Qwen/Qwen2.5-7B", True, "--vllm.gpu_memory_utilization", str(share))
    sleep = {name: asleep or name == "train.colocate_all" for name in SHARING}
    plan = Planner(
        with_options(plan.config, sleep | {"actor.num_gpus_per_node": 8, "vllm.num_engines": 8})
    )
    laid_out = plan.as_configured()
    states = laid_out.policy.fullest.total
    gpu = SharedGpu(laid_out.memory, share, states, 1 * GIB, asleep, asleep)
    sampling, training = laid_out.moments
    working = (
        "activations",
        "fragmentation (estimate)",
        "head: workspace, hidden states and their gradient",
    )
    without = Moment(
        "", {name: size for name, size in training.parts.items() if name not in working}
    )
    try:
        gpu.check()
    except SharedGpuTooSmall:
        assert max(sampling.total, without.total) > laid_out.memory
    else:
        assert max(sampling.total, without.total) <= laid_out.memory + 2, "rounding"


def test_a_share_that_is_set_binds_and_one_that_is_not_is_searched():
    plan = planner("Qwen/Qwen2.5-32B", True, "--vllm.gpu_memory_utilization", "0.1")
    lacking = f"an engine needs 4.3 GiB more than its share of a GPU ({SHARE} 0.1)"
    assert plan.fewest_gpus() is None and lacking in plan.candidates(8)[0].binding
    best = planner("Qwen/Qwen2.5-7B", False).candidates(8)[0]
    assert best.options[SHARE] == best.share < 0.95 and not best.tight()


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [
        ("Qwen/Qwen2.5-7B", 4, ("--data.max_len", "32768")),
        ("Qwen/Qwen2.5-7B", 1, ()),
        ("Qwen/Qwen3-30B-A3B", 2, ("--rollout.batch_size", "512")),
        ("meta-llama/Llama-3.1-70B", 8, ("--ds.lora.rank", "16", "--data.max_len", "8192")),
    ],
)
def test_more_cache_is_never_slower_and_the_largest_share_that_leaves_room_wins_ties(
    model, tp, words
):
    plan = dataclasses.replace(planner(model, True, *words), response_tokens=1000)
    engines = {"vllm.tensor_parallel_size": tp, "vllm.num_engines": 8 // tp}
    seconds = []
    for percent in range(20, 96):
        found = plan.clock.engines(with_options(plan.config, {**engines, SHARE: percent / 100}))
        seconds.append(plan.clock.rollout(found))
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0]
    best = plan.candidates(8)[0]
    layout = {name: value for name, value in best.options.items() if name != SHARE}
    larger = [
        plan.candidate({}, config, plan.models(config))
        for share in SHARES
        if share > best.share
        for config in [with_options(plan.config, {**layout, SHARE: share})]
    ]
    assert best.seconds is not None and all(one.seconds is None or one.tight() for one in larger)
    assert best.share >= 0.7


def test_weights_travel_between_nodes_where_the_engines_are_on_others():
    """Policy and engines within eight GPUs share a node, whatever the policy takes of it."""
    words = ("--vllm.num_engines", "4", "--vllm.tensor_parallel_size", "1")
    plans = [
        planner("Qwen/Qwen2.5-7B", False, "--actor.num_gpus_per_node", ranks, *words)
        for ranks in ("4", "8")
    ]
    near, far = (plan.timed().sync - 0.05 - 3 * 0.018 for plan in plans)
    assert far == pytest.approx(9 * near), "450 GB/s within a node, 50 between nodes"
    assert far == pytest.approx(2 * plans[1].parameters / 35e9), "of which 70 % are reached"
    by_gloo = planner(
        "Qwen/Qwen2.5-7B",
        False,
        "--actor.num_gpus_per_node",
        "8",
        *words,
        "--vllm.sync_backend",
        "gloo",
    )
    assert by_gloo.timed().sync == pytest.approx(
        2 * plans[1].parameters * 1.15e-9 + 0.05 + 3 * 0.018
    )


def test_the_longest_sequence_is_the_last_that_fits_and_offloaded_states_make_room_for_more():
    cut = (
        "--megatron.tensor_parallel_size",
        "2",
        "--megatron.sequence_parallel_enable",
        "--actor.num_gpus_per_node",
        "8",
        "--vllm.num_engines",
        "2",
        "--vllm.tensor_parallel_size",
        "4",
        "--megatron.recompute",
        "none",
        "--vllm.gpu_memory_utilization",
        "0.6",
        "--train.micro_batch_size",
        "1",
    )
    plan = planner("meta-llama/Llama-3.1-8B", True, *cut)
    laid_out = plan.as_configured()
    prompt = plan.config.data.max_len - plan.work.longest
    longest, with_offload = plan.longest(laid_out), plan.longest(laid_out, plan.to_host)
    assert 8192 < longest < with_offload <= 131072, "the window"
    for tokens in (longest, longest + 1024):
        lengths = {"data.max_len": tokens, "rollout.max_new_tokens": tokens - prompt}
        one = dataclasses.replace(plan, config=with_options(plan.config, lengths)).as_configured()
        assert one.fits == (tokens == longest)
    between = {"data.max_len": longest - 500, "rollout.max_new_tokens": longest - 500 - prompt}
    longer = with_options(plan.config, between)
    assert dataclasses.replace(plan, config=longer).longest(laid_out) == longest, (
        "also of a length between two steps"
    )
    small = planner(
        "Qwen/Qwen2.5-0.5B", True, "--actor.num_gpus_per_node", "8", "--vllm.num_engines", "8"
    )
    small.shape_of("actor.model_name_or_path")
    small._shapes["actor.model_name_or_path"] = dataclasses.replace(small.shape, max_positions=1500)
    assert small.longest(small.as_configured()) == 1500, "a window that is no whole number of steps"
    assert plan.longest(laid_out, {"vllm.gpu_memory_utilization": 0.1}) == 0, (
        "its engine holds no sequence"
    )


def test_an_engines_sampler_is_in_the_sum_and_its_pool_in_host_memory_where_it_sleeps():
    """By hand: 1,024 requests x 152,064 entries as int32, and a bit of each, beside Qwen2.5-7B's
    weights."""
    plan = planner(
        "Qwen/Qwen2.5-7B", True, "--vllm.num_engines", "8", "--actor.num_gpus_per_node", "8"
    )
    laid_out = plan.as_configured()
    sampler = laid_out.moments[0].parts["engine: sampler (requests x vocabulary)"]
    assert sampler == 1024 * (152064 * 4 + 152064 // 8) and 594 < sampler / 2**20 < 613
    halved = planner("Qwen/Qwen2.5-7B", True, "--vllm.max_num_seqs", "512").as_configured()
    assert halved.moments[0].parts["engine: sampler (requests x vocabulary)"] == sampler // 2
    pinned = "engines asleep (level 1: adapters, evaluations), pinned"
    assert laid_out.host[pinned] == 8 * (2 * plan.parameters + sampler)
    assert pinned not in planner("Qwen/Qwen2.5-7B", False).as_configured().host


@pytest.mark.parametrize(
    ("recipe", "gain"), [("blockwise", 1.40), ("current", 1.69), ("delayed", 1.75)]
)
def test_products_in_fp8_gain_what_was_measured(recipe, gain):
    """Of 0.69 of the peak in bf16; nothing on a GPU without FP8, and nothing where FP8 is
    emulated."""
    clock = planner("Qwen/Qwen2.5-7B", False).clock
    assert clock._products(989e12) == pytest.approx(1 / 0.69, rel=1e-3)
    assert clock._products(1.0) / clock._products(1.0, recipe) == pytest.approx(gain)
    old = dataclasses.replace(clock, gpu=GPUS["A100"])
    assert old._products(1.0) == old._products(1.0, recipe)
    large = (
        "--train.dynamic_batch_enable",
        "--train.max_tokens_per_gpu",
        "16384",
        "--megatron.param_dtype",
        "bf16",
    )
    words = (*large, "--fp8.enable", "--fp8.recipe", recipe)
    fp8, plain = (
        planner("Qwen/Qwen2.5-7B", False, *words).timed(),
        planner("Qwen/Qwen2.5-7B", False, *large).timed(),
    )
    assert 1.05 < plain.train / fp8.train < gain, "attention, head and what moves stay as they are"
    assert planner("Qwen/Qwen2.5-7B", False, *words, "--fp8.emulate").timed().train == plain.train
    mlps = planner("Qwen/Qwen2.5-7B", False, *words, "--fp8.modules", "mlp").timed()
    assert fp8.train < mlps.train < plain.train


TP2 = ("--megatron.tensor_parallel_size", "2", "--megatron.sequence_parallel_enable")


def test_a_mixtures_tokens_travel_within_a_node_where_experts_do():
    """64 KiB a token and layer pass of Qwen3-30B-A3B: 2 bytes, hidden 2,048, 8 experts, there and
    back."""
    words = (
        "--actor.num_nodes",
        "4",
        "--actor.num_gpus_per_node",
        "8",
        "--megatron.expert_parallel_size",
    )
    near, far = (planner("Qwen/Qwen3-30B-A3B", False, *words, str(ep)) for ep in (8, 32))
    tokens, messages = 8192, 2 * 20e-6
    sent = 1.3 * tokens * 65536
    exchanges = [
        plan.clock._exchange(
            plan.models(plan.config).policy, layers=1, states=tokens * 4096, passes=1
        )
        for plan in (near, far)
    ]
    assert exchanges[0] == pytest.approx(sent * 7 / 8 / (0.7 * 450e9) + messages)
    assert exchanges[1] == pytest.approx(sent * 24 / 32 / (0.7 * 50e9) + messages)
    model = near.models(near.config).policy
    assert near.clock._exchange(model, 1, tokens * 4096, passes=3) == pytest.approx(
        2 * exchanges[0]
    )
    assert near.clock._exchange(model, 1, tokens * 4096, passes=4) == pytest.approx(
        3 * exchanges[0]
    )
    assert far.timed().train > near.timed().train
    cut = planner("Qwen/Qwen3-30B-A3B", False, *words[:4], *TP2)
    # a gather, a scatter
    shared = cut.clock._exchange(cut.models(cut.config).policy, 1, tokens * 2048, passes=1)
    assert shared == pytest.approx(tokens * 32768 / (0.7 * 450e9) + messages)


def test_of_a_mixture_only_what_a_token_meets_is_computed():
    mixture, dense = (planner(f"Qwen/Qwen3-{name}", False).clock for name in ("30B-A3B", "32B"))
    assert (
        mixture.active == pytest.approx(3.35e9, rel=0.01) and mixture.parameters == 30_532_122_624
    )
    assert dense.active == dense.parameters
    engines = mixture.engines(planner("Qwen/Qwen3-30B-A3B", False).config)
    alone, many = (mixture._decode(engines, batch) - 48 * 30e-6 for batch in (1, 256))
    per_token = engines.kv_token_bytes * mixture._held
    read = (alone - per_token / (0.56 * 3350e9)) * 0.56 * 3350e9
    assert read == pytest.approx(2 * mixture.active, rel=0.01)
    assert many - 256 * per_token / (0.56 * 3350e9) == pytest.approx(
        engines.weights / (0.56 * 3350e9), rel=0.01
    )


def test_layouts_of_a_mixture_cut_no_expert_and_deal_them_within_a_node():
    plan = planner(
        "Qwen/Qwen3-30B-A3B", True, "--train.dynamic_batch_enable", "--data.max_len", "4096"
    )
    found = plan.candidates(16)
    layouts = {candidate.policy.layout for candidate in found}
    assert {layout.expert_parallel_size for layout in layouts} == {1, 2, 4, 8}
    assert all(layout.expert_tensor == 1 for layout in layouts)
    assert all(layout.sequence_parallel == (layout.tensor_parallel_size > 1) for layout in layouts)
    assert {one.policy.megatron.recompute_modules for one in found} == {("core_attn",), ("moe",)}
    sixteen = (
        "--actor.num_nodes",
        "2",
        "--vllm.num_engines",
        "16",
        "--megatron.expert_parallel_size",
        "16",
    )
    given = planner("Qwen/Qwen3-30B-A3B", True, *sixteen)
    given = dataclasses.replace(
        given, config=with_options(given.config, {"train.dynamic_batch_enable": True})
    )
    assert {one.policy.layout.expert_parallel_size for one in given.candidates(16)} == {16}


def test_the_stage_with_the_head_gets_fewer_layers_where_that_is_faster():
    assert balanced_ends(28, 4, 1, head=1.8) == (6, 6), "6 + 8 + 8 + 6"
    assert balanced_ends(28, 2, 1, head=1.8) == (None, 13)
    assert balanced_ends(64, 4, 1, head=0.9) is None, (
        "16.9 even, and 17 with one layer fewer on the last"
    )
    assert balanced_ends(48, 4, 4, head=9) == (12, 4), "12 + 16 + 16 + 4 in chunks of 3, 4, 4 and 1"


def test_a_small_model_with_a_large_head_is_cut_unevenly():
    """0.5B, whose head takes as long as several layers: plan's cut is faster than the even one of
    the same degrees."""
    words = (
        "--train.max_tokens_per_gpu",
        "65536",
        "--train.dynamic_batch_enable",
        "--rollout.max_new_tokens",
        "1024",
    )
    plan = planner("Qwen/Qwen2.5-0.5B", False, *words)
    steps = {
        tuple(one.policy.layers): one.seconds.train for one in plan.candidates(8) if two_stages(one)
    }
    even, uneven = steps.pop((12, 12)), steps.popitem()
    assert sum(uneven[0]) == 24 and uneven[0][0] > uneven[0][1] and uneven[1] < even


def two_stages(candidate: Candidate) -> bool:
    layout, megatron = candidate.policy.layout, candidate.policy.megatron
    degrees = (
        layout.tensor_parallel_size,
        layout.pipeline_parallel_size,
        layout.virtual_pipeline_size,
    )
    return degrees == (1, 2, 1) and layout.world_size == 4 and megatron.recompute == "none"


def test_a_micro_batch_costs_its_launches_however_small_it_is():
    """Half the tokens take half the seconds only while the GPU is what binds."""
    words = (
        "--actor.num_gpus_per_node",
        "8",
        "--vllm.num_engines",
        "8",
        "--rollout.max_new_tokens",
        "128",
    )
    one, two, many = (
        planner(
            "Qwen/Qwen2.5-7B",
            True,
            *words,
            "--data.max_len",
            "256",
            "--train.micro_batch_size",
            size,
        ).timed()
        for size in ("1", "2", "64")
    )
    assert one.train == pytest.approx(2 * two.train, rel=0.1) and many.train < two.train / 2


def test_a_card_is_known_by_all_of_its_names():
    names = {
        "A100": (
            "A100-80",
            "a100",
            "A100 80GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100 80GB PCIe",
            "A100-SXM",
        ),
        "A100-40": ("A100-40GB", "A100 40", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        "H100": ("H100-80", "H100 SXM", "h100-sxm5", "NVIDIA H100 80GB HBM3"),
        "L4": ("NVIDIA L4", "L4-24GB"),
        "H100-NVL": ("NVIDIA H100 NVL", "H100-NVL-94"),
        "A40": ("NVIDIA A40",),
        "H100-PCIe": ("NVIDIA H100 PCIe", "H100-PCIE"),
        "H200": ("NVIDIA H200", "H200-141GB"),
        "H20": ("NVIDIA H20",),
        "A800": ("NVIDIA A800-SXM4-80GB",),
        "H800": ("H800-80",),
        "B200": ("NVIDIA B200", "B200-192"),
        "GB200": ("NVIDIA GB200",),
        "L40S": ("NVIDIA L40S", "L40S-48"),
        "RTX-4090": ("4090", "RTX4090", "NVIDIA GeForce RTX 4090"),
    }
    assert names.keys() == GPUS.keys()
    for entry, others in names.items():
        assert {card(name) for name in (entry, *others)} == {entry}
    for name in ("V100", "A100-20", "H1000", "NVIDIA GH200 480GB", "MI300X", "", "L40", "H200-80"):
        assert card(name) is None, name
