# shellcheck shell=bash
# What the commands for a GPU machine have in common, for `source`: after it $python is an interpreter with the checkout,
# and the bundle that the arguments name, on its path. A whole bundle (tests/gpu/whole) is unpacked first, once, into
# OPENRLHF_EXT_SITE (default /tmp/openrlhf_ext_site); OPENRLHF_EXT_TOY is then the folder of the quickstart's policy
# (start/) and problems (data/). tests.gpu.start says whether the interpreter can run the checks. Nothing is installed or
# fetched.

export COMMAND="${0#"$PWD"/}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

_fail() {
    echo "$COMMAND: $1" >&2
    exit 1
}

_find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        echo "$PYTHON"
    elif [[ -x "$ROOT/.venv/bin/python" ]]; then
        echo "$ROOT/.venv/bin/python"
    else
        command -v python3 || _fail "there is no .venv in the checkout and no python3: PYTHON=/path/to/python names one"
    fi
}

_bundle() {
    while (($# > 0)); do
        case "$1" in
        --bundle) echo "${2:-}" && return ;;
        --bundle=*) echo "${1#--bundle=}" && return ;;
        esac
        shift
    done
}

# its manifest may be what is missing
_is_whole() {
    grep -qs '"kind": "whole"' "$1/manifest.json" || compgen -G "$1/part-*" >/dev/null
}

python="$(_find_python)"
bundle="$(_bundle "$@")"

site="${bundle:+$(cd "$bundle" && pwd)/site}"
if [[ -n "$bundle" ]] && _is_whole "$bundle"; then
    unpacked="$(PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$python" -m tests.gpu.whole.here "$bundle")" || exit 1
    site="$unpacked/site"
    export OPENRLHF_EXT_TOY="$unpacked/toy"
    # neither package is in it: unset, the first is an ImportError in vLLM's sampler (v1/sample/ops/topk_topp_sampler.py:101)
    export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0
fi
export PYTHONPATH="$ROOT${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=disabled TOKENIZERS_PARALLELISM=false
export VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
# TransformerEngine compiles kernels while it runs, and does not look where CUDA 13's wheels have their headers
if [[ -z "${NVTE_CUDA_INCLUDE_DIR:-}" ]]; then
    NVTE_CUDA_INCLUDE_DIR="$("$python" -c 'from openrlhf_ext.fp8 import wheel_folder as f; print(f() / "include" if f() else "")')"
    if [[ -n "$NVTE_CUDA_INCLUDE_DIR" ]]; then export NVTE_CUDA_INCLUDE_DIR; fi
fi
# it would load a second libcudnn.so, of the CUDA toolkit (megatron.settings.training_environment); for the rest of cuDNN
# see patches/transformer_engine_cudnn.py
if [[ -z "${CUDNN_HOME:-}" ]]; then
    CUDNN_HOME="$("$python" -c 'from openrlhf_ext.fp8 import wheel_folder as f; print(f("cudnn") or "")')"
    if [[ -n "$CUDNN_HOME" ]]; then export CUDNN_HOME; fi
fi
# shellcheck source=examples/scripts/cuda_queues.sh
source "$ROOT/examples/scripts/cuda_queues.sh"
# one thread for each process: those of a check share the cores
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# installed, the package has the folder patches/ of the checkout as a part (setup.py); here it need not be installed
if ! (cd "$ROOT" && "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("openrlhf_ext.patches") is None)'); then
    ln -sfn ../patches "$ROOT/openrlhf_ext/patches"
fi
