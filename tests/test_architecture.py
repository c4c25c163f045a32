"""The arrows of docs/architecture.md: which room may import which."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import selection

PACKAGE = Path(__file__).parent.parent / "openrlhf_ext"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
HEAVY = {"ray", "vllm", "megatron", "openrlhf", "deepspeed", "transformers", "pydantic"}
CORE = {
    "algorithms", "checkpoints", "compat", "config", "driver", "exact", "fp8", "groups", "head", "imports",
    "megatron", "options", "patches", "planning", "ranks", "reporting", "rewards", "rollout",
}  # fmt: skip
# room -> rooms of ours (or parts of them) it may import, and outside packages it may not
RULES = {
    "options": ({"fp8.recipe", "inputs", "redaction"}, HEAVY - {"pydantic"} | {"torch"}),
    "algorithms": ({"options", "user_code"}, HEAVY - {"pydantic"}),
    "head": (set(), HEAVY),
    "fp8": (set(), HEAVY),
    "exact": (set(), HEAVY - {"vllm"}),
    "checkpoints": ({"inputs"}, HEAVY),
    "config": (
        {
            "algorithms",
            "fp8.recipe",
            "inputs",
            "megatron.layout",
            "megatron.model.adapter",
            "megatron.model.shape",
            "options",
            "outputs",
            "redaction",
        },
        HEAVY - {"pydantic"} | {"torch"},
    ),
    "groups": (set(), HEAVY),
    "planning": (
        {"config", "inputs", "megatron", "options", "ranks.shared_gpu", "redaction"},
        HEAVY,
    ),
    "megatron": (
        {
            "algorithms",
            "checkpoints",
            "delta_rule",
            "exact",
            "fp8",
            "groups",
            "head",
            "inputs",
            "options",
            "patches",
        },
        {"ray", "vllm", "openrlhf", "deepspeed", "pydantic"},
    ),
    "rollout": (
        {"compat", "exact", "fp8", "groups", "imports", "options", "patches"},
        {"megatron", "openrlhf", "pydantic"},
    ),
    "rewards": (
        {"compat", "groups", "inputs", "options", "redaction", "rollout", "user_code"},
        {"megatron", "openrlhf", "vllm", "ray", "pydantic"},
    ),
    "reporting": ({"inputs", "outputs", "redaction"}, HEAVY),
    "run": (
        {
            "checkpoints",
            "compat",
            "config",
            "inputs",
            "locks",
            "megatron.layers.lora",
            "megatron.model.hf_files",
            "megatron.model.shape",
            "megatron.settings",
            "megatron.step",
            "options",
            "patches",
            "redaction",
            "reporting",
        },
        {"ray", "vllm", "megatron", "openrlhf", "deepspeed", "pydantic"},
    ),
    "sft": (
        {
            "algorithms",
            "checkpoints",
            "compat",
            "config",
            "groups",
            "inputs",
            "megatron",
            "options",
            "ranks.movement",
            "redaction",
            "reporting",
            "run",
        },
        {"ray", "vllm", "openrlhf", "deepspeed", "pydantic"},
    ),
    "ranks": (
        CORE - {"config", "driver", "reporting", "rewards"},
        {"openrlhf", "vllm", "pydantic"},
    ),
    "driver": (
        CORE | {"inputs", "locks", "redaction", "run", "user_code"},
        {"openrlhf", "vllm", "megatron", "pydantic"},
    ),
    "tools": (
        {
            "algorithms",
            "config",
            "fp8",
            "inputs",
            "megatron",
            "options",
            "groups",
            "outputs",
            "patches",
            "planning",
            "redaction",
            "reporting",
            "rewards",
            "rollout.response",
            "run.ledger",
        },
        {"ray", "vllm", "openrlhf", "deepspeed"},
    ),
}


# files and rooms that import files of ours inside functions; docs/architecture.md says why
LATE = (
    "cli/", "config/estimator.py", "config/run_config.py", "config/show.py", "driver/job.py", "driver/preflight.py",
    "driver/processes.py", "driver/engines.py", "head/kernels.py", "rollout/sync/plan.py",
    "megatron/layers/exact.py", "megatron/layers/fp8.py", "megatron/layers/lora.py", "megatron/mlps/moe.py", "ranks/",
    "megatron/attentions/delta_net.py",
    "rollout/engine.py", "driver/trials.py", "sft/data.py", "sft/recorder.py", "tools/plan/conversion_check.py",
)  # fmt: skip


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, also inside functions."""
    return set(selection.imports(ast.parse(path.read_text())))


@pytest.mark.parametrize("room", RULES)
def test_arrows_point_one_way(room):
    allowed, forbidden = RULES[room]
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "openrlhf_ext" and len(parts) > 1:
                inside = {".".join(parts[1:end]) for end in range(2, len(parts) + 1)}
                assert inside & (allowed | {room, "__version__"}), f"{path}: imports {name}"
            assert parts[0] not in forbidden, f"{path}: imports {name}"


def files_imported(path: Path, files: dict[str, Path]) -> set[Path]:
    """Files of ours that a file imports anywhere, also inside functions and for types only."""
    found = set()
    for name in imports(path):
        parts = name.split(".")
        while parts and ".".join(parts) not in files:
            parts.pop()
        if parts:
            found.add(files[".".join(parts)])
    return found - {path}


def test_no_files_import_each_other_in_a_circle():
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {path: files_imported(path, files) for path in files.values()}
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        circle = [str(path.relative_to(PACKAGE)) for path in error.args[1]]
        pytest.fail(f"these files import each other: {' <- '.join(circle)}")


def test_imports_inside_functions_are_those_that_the_documentation_explains():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        functions = (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS)
        )
        inside = (
            node
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.ImportFrom)
        )
        if any((node.module or "").split(".")[0] == "openrlhf_ext" for node in inside):
            found.add(next((place for place in LATE if name.startswith(place)), name))
    assert found == set(LATE)


def test_only_compat_imports_openrlhf():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "compat.py":
            assert not any(n.split(".")[0] == "openrlhf" for n in imports(path)), path


def test_the_package_imports_nothing_that_is_not_shipped_with_it():
    for path in PACKAGE.rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & {
            "benchmarks",
            "examples",
            "tests",
        }, path


def test_every_room_is_covered():
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms - {"cli"} == set(RULES)


# ---- budgets: who exceeds one deletes in the same commit

NODES = {
    "openrlhf_ext/algorithms": 38_850,
    "openrlhf_ext/checkpoints": 7_100,
    "openrlhf_ext/cli": 19_550,
    "openrlhf_ext/config": 35_800,
    "openrlhf_ext/driver": 51_550,
    "openrlhf_ext/exact": 5_000,
    "openrlhf_ext/fp8": 3_300,
    "openrlhf_ext/groups": 3_600,
    "openrlhf_ext/head": 13_100,
    "openrlhf_ext/megatron": 71_150,
    "openrlhf_ext/options": 14_250,
    "openrlhf_ext/planning": 20_550,
    "openrlhf_ext/ranks": 9_250,
    "openrlhf_ext/reporting": 6_700,
    "openrlhf_ext/rewards": 24_600,
    "openrlhf_ext/rollout": 31_700,
    "openrlhf_ext/run": 12_650,
    "openrlhf_ext/sft": 8_200,
    "openrlhf_ext/tools": 40_250,
    "openrlhf_ext": 426_700,
    "benchmarks": 94_100,
    "patches": 7_950,
    "tests/gpu": 62_950,
}
WORDS = 64_850
FEATURES = {  # identifiers that name it -> files of the package that may
    "expert|moe": 38,
    "lora": 23,
    "fp8": 21,
}
SUPERVISED = re.compile(r"SupervisedConfig|\bsft\b|supervised", re.IGNORECASE)
ROOT = PACKAGE.parent


def sources(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(folder.rglob("*.py"))}


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


@pytest.mark.parametrize("folder", NODES)
def test_no_room_weighs_more_than_its_budget(folder):
    """In syntax nodes: layout, blank lines, and comments weigh nothing."""
    trees = map(ast.parse, sources(ROOT / folder).values())
    assert sum(sum(1 for _ in ast.walk(tree)) for tree in trees) <= NODES[folder]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_named_in_few_files(feature):
    named = [
        path
        for path, text in sources(PACKAGE).items()
        if any(re.search(feature, name, re.IGNORECASE) for name in identifiers(ast.parse(text)))
    ]
    assert len(named) <= FEATURES[feature]


def test_supervised_training_is_named_in_few_files_but_its_own():
    texts = sources(PACKAGE)
    own = {path for path in texts if "sft" in path.relative_to(PACKAGE).as_posix()}
    assert len([path for path in texts.keys() - own if SUPERVISED.search(texts[path])]) <= 8


def test_lines_breathe():
    """The formatter decides, but for tables of data; a line that it cannot break may be longer."""
    texts = [
        text
        for folder in ("openrlhf_ext", "patches", "benchmarks")
        for text in sources(ROOT / folder).values()
    ]
    marks = sum(len(re.findall(r"# fmt: (?:off|skip)", text)) for text in texts)
    lines = [line for text in texts for line in text.splitlines()]
    assert marks < 40 and sum(len(line) > 100 for line in lines) < 0.01 * len(lines)


def test_functions_are_short():
    for path, text in sources(PACKAGE).items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, FUNCTIONS):
                assert node.end_lineno - node.lineno < 75, f"{path}: {node.name}"


def test_documents_are_short():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= WORDS
