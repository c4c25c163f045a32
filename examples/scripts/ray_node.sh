#!/usr/bin/env bash
# Makes this node part of a Ray cluster and stays in the foreground; Ctrl-C takes the node out again.
#
#   bash examples/scripts/ray_node.sh head              on the first node
#   bash examples/scripts/ray_node.sh join HEAD         on every other node; HEAD = name or address of the first one
#
# The cluster asks for a token: that of RAY_AUTH_TOKEN or of the file RAY_AUTH_TOKEN_PATH, else of ~/.ray/auth_token,
# which the head makes if it is not there, and which every other node needs. RAY_AUTH_MODE=disabled starts one without.
#
# launch.sh calls it on every node: `--attached FOLDER` before the role takes the environment from standard input, works
# in FOLDER, and ends when standard input does; the role `run COMMAND...` is any command under the same rules. Ray hands
# its environment to every process of a run, so what NCCL should know (NCCL_SOCKET_IFNAME, ...) is there before.
#
# Variables that you may set:
#   RAY_PORT    port of the head                                         (default: 6379)
#   NODE_GPUS   GPUs of this node                                        (default: as many as nvidia-smi lists)
#   NODE_NAME   what messages and logs call it; an IPv4 address is also the one that Ray uses  (default: host name)
#   RUN_FOLDER  folder of a run: logs of all processes go to logs/NODE_NAME in it, every COPY_S seconds and at the end
#   DRIVER_END_S  how long `run COMMAND` may take to save and end after SIGTERM  (default: 120)
#   RAY_TMPDIR  where Ray keeps its files, a short path                  (default: /tmp)

set -euo pipefail

# shellcheck source=examples/scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
COPY_S=5

# Everything of the environment goes but what a login has, and what a batch system says about this job's devices; then
# the records of `environment` in launch.sh come.
take_environment() {
    local name record
    while read -r name; do
        case $name in
            PATH | HOME | USER | LOGNAME | SHELL | LANG | LC_* | TMPDIR | LD_LIBRARY_PATH | CUDA_VISIBLE_DEVICES) ;;
            *) unset "$name" ;;
        esac
    done < <(compgen -e)
    while IFS= read -r -d '' record && [[ -n $record ]]; do
        if [[ -n ${record#*=} ]]; then export "${record?}"; fi
    done
    python=${OPENRLHF_EXT_VENV:-$ROOT/.venv}/bin/python port=${RAY_PORT:-6379}
    [[ -x $python ]] || python=python
}

# The token that came with the environment moves into a file: every process of a run inherits the environment, and
# programs like to show theirs. By hand it is Ray's own file.
keep_token() {
    export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
    [[ $RAY_AUTH_MODE == token ]] || return 0
    if [[ -n ${RAY_AUTH_TOKEN:-} ]]; then
        secret=$(mktemp -d "${RAY_TMPDIR:-/tmp}/ray_node_token_XXXXXX")
        RAY_AUTH_TOKEN_PATH=$secret/token
        (umask 077 && printf %s "$RAY_AUTH_TOKEN" >"$RAY_AUTH_TOKEN_PATH")
        unset RAY_AUTH_TOKEN
    fi
    export RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
    if [[ $1 == head && ! -e $RAY_AUTH_TOKEN_PATH ]]; then
        (umask 077 && mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")" &&
            "$python" -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH")
        say "made a token for the cluster, $RAY_AUTH_TOKEN_PATH: every node needs this file, and RAY_AUTH_MODE=token"
    fi
    if [[ ! -s $RAY_AUTH_TOKEN_PATH ]]; then
        say "this node has no token: $RAY_AUTH_TOKEN_PATH is not there, or empty; copy the head's (mode 600)"
        exit 1
    fi
    if [[ $(stat --dereference --format %a "$RAY_AUTH_TOKEN_PATH") != *00 ]]; then
        say "others can read the token: chmod 600 $RAY_AUTH_TOKEN_PATH"
        exit 1
    fi
}

start_ray() {
    local gpus cpus ray=${python%python}ray options=(--node-name "$name" --disable-usage-stats --block)
    gpus=${NODE_GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)}
    if ((gpus == 0)); then
        say "nvidia-smi lists no GPU on $(hostname); set NODE_GPUS to count some all the same"
        exit 1
    fi
    # a rank takes one of Ray's CPUs beside its GPU, and so does an engine; Ray only counts them
    cpus=$(nproc)
    if ((cpus < 2 * gpus + 1)); then cpus=$((2 * gpus + 1)); fi
    # for `ray job submit`; a cluster of one run needs none
    if [[ $1 == --head && -n $attached ]]; then options+=(--include-dashboard false); fi
    # launch.sh has one node alone listen on loopback by this variable
    if [[ $name =~ ^[0-9]+(\.[0-9]+){3}$ && ${RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER:-1} != 0 ]]; then
        options+=(--node-ip-address "$name")
    fi
    session=$(mktemp -d "${RAY_TMPDIR:-/tmp}/ray_XXXXXX")
    # shellcheck source=examples/scripts/cuda_queues.sh
    source "$ROOT/examples/scripts/cuda_queues.sh"
    unset RAY_ADDRESS
    "$ray" start "$@" --num-gpus "$gpus" --num-cpus "$cpus" --temp-dir "$session" "${options[@]}" &
    child=$!
    if [[ -n ${RUN_FOLDER:-} ]]; then
        started=$(date +%H%M%S)
        while sleep "$COPY_S"; do copy_logs; done &
    fi
}

# A file system that is full must not end a run that goes on without these copies.
copy_logs() {
    local own="$RUN_FOLDER/logs/$name" ray="$RUN_FOLDER/logs/$name/ray_$started" files
    mkdir -p "$ray" || return 0
    shopt -s nullglob
    files=("$session"/session_2*/logs/worker-*.{out,err})
    if ((${#files[@]})); then cp --update "${files[@]}" "$own" || true; fi
    files=("$session"/session_2*/logs/{raylet,gcs_server,monitor,log_monitor}.{out,err})
    if ((${#files[@]})); then cp --update "${files[@]}" "$ray" || true; fi
    shopt -u nullglob
}

# A driver saves first: SIGTERM goes to it alone, while its ranks and Ray live.
end_node() {
    local deadline=$((SECONDS + ${DRIVER_END_S:-120}))
    trap '' INT TERM HUP
    if [[ -n $driver ]]; then
        kill -TERM "$driver" 2>/dev/null || true
        while kill -0 "$driver" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
    fi
    end_marked "$mark"
    if [[ -n $secret ]]; then rm -rf "$secret"; fi
    if [[ -n $session ]]; then
        if [[ -n ${RUN_FOLDER:-} ]]; then copy_logs; fi
        rm -rf "$session"
    fi
}

attached='' session='' child='' secret='' driver=''
if [[ ${1:-} == --attached && $# -ge 3 ]]; then
    attached=1
    cd "$2"
    shift 2
    take_environment
fi
name=${NODE_NAME:-$(hostname)}
case "${1:-} $#" in
    "head 1") role=(start_ray --head --port "$port") ;;
    "join 2") role=(start_ray --address "$2:$port") ;;
    "run "[2-9]* | "run "1[0-9]*) role=(run_command "${@:2}") ;;
    *)
        sed -n '4,5s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac

run_command() {
    "$@" </dev/null &
    child=$! driver=$!
}

mark="NODE_MARK=$(hostname).$$.$RANDOM"
export "${mark?}"
trap end_node EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
if [[ -n $attached ]]; then
    self=$$
    exec 3<&0
    # bash says "Terminated" of a cat that end_node ends
    { cat <&3 >/dev/null; kill -TERM "$self"; } 2>/dev/null &
    exec 3<&-
fi
if [[ ${role[0]} == start_ray || -n ${RAY_AUTH_TOKEN:-} ]]; then keep_token "$1"; fi
"${role[@]}"
wait "$child"
