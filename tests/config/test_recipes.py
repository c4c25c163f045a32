from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from openrlhf_ext.cli import plan, train_ppo_ray
from openrlhf_ext.config import RunConfig, load_config
from openrlhf_ext.config.estimator import algorithm_options
from openrlhf_ext.driver import preflight
from openrlhf_ext.options import value_of
from openrlhf_ext.planning.memory import GIB
from openrlhf_ext.planning.search import Planner
from openrlhf_ext.tools.plan import layout_proof
from tests.config.conftest import MIXTURE, MODEL

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS, RECIPES = CONFIGS / "models", sorted((CONFIGS / "recipes").glob("*.yaml"))
STATED = yaml.safe_load((Path(__file__).parent / "stated.yaml").read_text())
PUBLISHED = [recipe for recipe in RECIPES if recipe.stem in STATED]
TWO_NODES = [
    "--actor.num_nodes",
    "2",
    "--ds.adam_offload",
    "false",
    "--vllm.num_engines",
    "4",
]
VARIANTS = {  # what the recipes name in their comments and docs/papers.md in its table
    "llama3.1_8b_gtpo_conflict": [
        "--rollout.n_samples_per_prompt",
        "12",
        "--train.batch_size",
        "12",
    ],
    "llama3.1_8b_grpo": ["--algo.grpo.kl_coef", "1e-6"],
    "qwen2.5_3b_grpo": ["--algo.grpo.kl_coef", "0.04"],
    "qwen2.5_32b_dapo": [
        "--algo.dynamic_filtering_enable",
        "false",
        "--algo.dapo.degenerate",
        "literal",
    ],
    "qwen2.5_7b_kl_cov": ["--algo.kl_cov.cov_ratio", "2e-4"],
    "qwen3.5_27b_grpo": [*TWO_NODES],
    "qwen3.5_35b_a3b_grpo": [*TWO_NODES, "--megatron.expert_parallel_size", "4"],
}
# whose model is the text model of a checkpoint with images
TEXT_MODELS = {
    "qwen3.5_27b_grpo": "qwen3.5-27b-text",
    "qwen3.5_35b_a3b_grpo": "qwen3.5-35b-a3b-text",
}
# whose model is a copy with another entry
STRETCHED = {"qwen2.5_7b_128k_grpo": "qwen2.5-7b", "qwen3_32b_64k_grpo": "qwen3-32b"}


@pytest.fixture
def load_recipe(run_dir: Path):
    """Loads a recipe with a model, data and a reward given, and more words."""
    record = json.dumps({"question": "1+1", "answer": "#### 2"}) + "\n"
    (run_dir / "train.jsonl").write_text(record * 1024)
    yours = [
        "--actor.model_name_or_path",
        "model",
        "--data.prompt_dataset",
        "train.jsonl",
        "--reward.remote_url",
    ]

    def load(recipe: Path, *words: str) -> RunConfig:
        shape = MIXTURE if "expert_parallel_size" in recipe.read_text() else MODEL
        (run_dir / "model/config.json").write_text(
            json.dumps(shape | {"max_position_embeddings": 1 << 17})
        )
        evaluated = ["--eval.dataset", "train.jsonl"] if "\neval." in recipe.read_text() else []
        return load_config(["--config", str(recipe), *yours, "reward.py", *evaluated, *words])

    return load


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_hold_once_model_data_and_reward_are_given(load_recipe, recipe: Path):
    config = load_recipe(recipe)
    assert config.warnings == ()
    found = preflight.findings(config)
    # no weights here
    assert [v.message for v in found.violations if v.options != ("actor.model_name_or_path",)] == []
    assert found.warnings == ()


# a search takes seconds, and differs by the model
PLANNED = {
    yaml.safe_load(recipe.read_text())["actor.model_name_or_path"]: recipe for recipe in PUBLISHED
}


def own_model(recipe: Path, folder: Path) -> list[str]:
    """The model of a recipe that users make first, a text model or a copy with another entry in its
    config.json, as an option; else none."""
    if recipe.stem in TEXT_MODELS:
        return ["--actor.model_name_or_path", str(MODELS / TEXT_MODELS[recipe.stem])]
    if recipe.stem not in STRETCHED:
        return []
    entry = re.search(r'^#   ("rope_scaling": .+)$', recipe.read_text(), flags=re.MULTILINE)
    config = json.loads((MODELS / STRETCHED[recipe.stem] / "config.json").read_text())
    scaled = config | {"max_position_embeddings": 32768} | json.loads(f"{{{entry[1]}}}")
    (folder / "made").mkdir()
    (folder / "made/config.json").write_text(json.dumps(scaled))
    return ["--actor.model_name_or_path", "made"]


@pytest.fixture(scope="module")
def proved() -> dict[str, Any]:
    return {}


@pytest.fixture
def proved_once(proved: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes that share a model and a layout, and differ in the method, share the proof: it is a
    function of these."""
    prove = layout_proof.prove_layout

    def once(folder: str, *facts: Any) -> Any:
        key = repr(((Path(folder) / "config.json").read_text(), *facts))
        if key not in proved:
            proved[key] = prove(folder, *facts)
        return proved[key]

    monkeypatch.setattr(layout_proof, "prove_layout", once)


@pytest.mark.usefixtures("proved_once")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_dry_run_and_planned_without_a_path(run_dir: Path, recipe: Path, capsys):
    """Its model's shape is that of configs/models; only the toy policy is made first. One of each
    model is planned."""
    (run_dir / "model/model.safetensors").unlink()
    toy = (
        ["--actor.model_name_or_path", "model"]
        if recipe.stem == "smoke_cpu"
        else own_model(recipe, run_dir)
    )
    if "\neval." in recipe.read_text():
        toy += ["--eval.dataset", "train.jsonl"]
    # else a hub's: every rank can be built, and no more be said
    is_here = "--actor.model_name_or_path" in toy
    status = train_ppo_ray.main(["--config", str(recipe), *toy, "--dry_run"])
    assert status == (0 if is_here else 3)
    first, *others = capsys.readouterr().out.splitlines()
    given = "would start, once data.prompt_dataset and reward.remote_url are given"
    assert (
        first.startswith(given if is_here else "cannot say: actor.model_name_or_path ")
        and "fit" not in first
    )
    assert others[-1] == first, "the verdict stands at the end too"
    screen = others[: others.index("the resolved configuration:")]
    assert (
        any(line.startswith("memory of the fullest GPU") for line in screen[:3])
        and len(screen) <= 50
    )
    if recipe in PLANNED.values() or recipe not in PUBLISHED:
        assert plan.main(["--config", str(recipe), *toy]) == 0


def test_a_dry_run_says_what_does_not_fit(capsys):
    recipe = ["--config", str(RECIPES[0].parent / "qwen2.5_7b_gtpo_entropy.yaml"), "--dry_run"]
    large = ["--train.max_tokens_per_gpu", "200000", "--rollout.max_tokens_per_gpu", "200000"]
    model = str(MODELS / "qwen2.5-7b")
    assert train_ppo_ray.main([*recipe, *large, "--actor.model_name_or_path", model]) == 0
    out = capsys.readouterr().out
    assert re.match(
        r"would start, once .*, but it does not fit on an H100 .*: memory is [\d.]+ GiB short "
        r"while training, and activations is the largest part; openrlhf-ext plan finds layouts "
        r"that fit\n",
        out,
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_recipes_hold(load_recipe, name: str):
    (recipe,) = (path for path in RECIPES if path.stem == name)
    config = load_recipe(recipe, *VARIANTS[name])
    found = preflight.findings(config)
    assert [v.message for v in found.violations if v.options != ("actor.model_name_or_path",)] == []
    assert (*config.warnings, *found.warnings) in ((), config.warnings) and len(
        config.warnings
    ) <= 1
    assert all("rollout.max_filter_batches has no effect" in warning for warning in config.warnings)


def blocks(recipe: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """(stated values, where each stands, our values) of a recipe."""
    stated, _, ours = recipe.read_text().partition("# --- stated ")[2].partition("# --- ours ")
    stated, ours = stated.partition("\n")[2], ours.partition("\n")[2]
    places = dict(re.findall(r"^([\w.]+): .*?\S +# (.+)$", stated, flags=re.MULTILINE))
    return yaml.safe_load(stated), places, yaml.safe_load(ours)


def same(value: Any) -> Any:
    """Without the difference between a list and a tuple."""
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("recipe", PUBLISHED, ids=lambda path: path.stem)
def test_what_a_recipe_marks_as_stated_is_what_its_source_states(load_recipe, recipe: Path):
    stated, places, ours = blocks(recipe)
    transcript = STATED[recipe.stem]["stated"]
    assert {name: [value, places.get(name)] for name, value in stated.items()} == transcript
    assert not set(stated) & set(ours)
    everything = yaml.safe_load(recipe.read_text())
    assert everything == stated | ours, "every value is marked"
    config = load_recipe(recipe)
    options = algorithm_options(config)[1]
    method = f"algo.{config.algo.advantage.estimator}."
    for name, (value, _) in transcript.items():
        leaf = name.removeprefix(method)
        if leaf == name:
            assert same(value_of(config, name)) == value, name
        else:
            assert options_value(options, leaf) == value, name


def options_value(options: dict[str, Any], leaf: str) -> Any:
    """An option of the method as it was resolved; below ``length_penalty`` too."""
    value: Any = options
    for part in leaf.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return same(value)


def test_every_transcript_has_its_recipe():
    assert {recipe.stem for recipe in PUBLISHED} == set(STATED)


def test_the_quickstarts_options_run_without_an_evaluation(run_dir: Path):
    (run_dir / "train.jsonl").write_text(
        (json.dumps({"question": "1+1", "answer": "#### 2"}) + "\n") * 32
    )
    quickstart = RECIPES[0].parents[1] / "quickstart.yaml"
    words = ["--actor.model_name_or_path", "model", "--data.prompt_dataset", "train.jsonl"]
    config = load_config(["--config", str(quickstart), *words, "--reward.remote_url", "reward.py"])
    assert [warning.partition(":")[0] for warning in config.warnings] == [
        f"eval.{leaf} has no effect" for leaf in ("steps", "temperature", "n_samples_per_prompt")
    ]
    assert all("set eval.dataset, or leave it out" in warning for warning in config.warnings)


@pytest.mark.parametrize(
    "recipe",
    [path for path in RECIPES if path.stem in (*STRETCHED, *TEXT_MODELS)],
    ids=lambda path: path.stem,
)
def test_the_tables_of_recipes_are_what_plan_sums(run_dir: Path, recipe: Path):
    words = ["--config", str(recipe), *own_model(recipe, run_dir)]
    laid_out = Planner(load_config(words, files=False)).as_configured()
    assert laid_out.seconds is not None
    sampling, training = (moment.total for moment in laid_out.moments)
    sums = training, laid_out.moments[1].parts["activations"], sampling
    row = (
        f"{' | '.join(f'{size / GIB:.1f}' for size in sums)} | "
        f"{sum(laid_out.host.values()) / GIB:.0f} |"
    )
    table = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
    (line,) = (line for line in table.splitlines() if line.startswith(f"| `{recipe.stem}`"))
    assert line.endswith(row), row


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_recipes_of_hybrids_fit_on_two_nodes_with_adam_on_the_gpus(run_dir: Path, name: str):
    recipe = RECIPES[0].parent / f"{name}.yaml"
    words = ["--config", str(recipe), *own_model(recipe, run_dir), *VARIANTS[name]]
    laid_out = Planner(load_config(words, files=False)).as_configured()
    assert laid_out.seconds is not None and not laid_out.tight()
    told = recipe.read_text().replace("\n#   ", " ")
    assert " ".join(VARIANTS[name]) in told
