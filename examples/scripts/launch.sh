# shellcheck shell=bash
# What the scripts that start a run have in common, for `source`: checks, the nodes' Ray, the driver, the end of all.
#
# A script sets `nodes` (the first one is the head, where the driver runs too), defines `on_node NODE COMMAND...`, which
# runs a command there and hands its standard input on, and calls `launch WORDS...`, the words of a training command:
#
#   RECIPE MODEL DATA REWARD [--entity.name value ...]      or only options:  --config FILE [--entity.name value ...]
#
#   RECIPE   name of a file in configs/recipes, without .yaml
#   MODEL    folder of a Hugging Face checkpoint; on several nodes on storage that all of them see
#   DATA     prompts: a .jsonl file with the keys question and answer (other keys: --data.input_key, --data.label_key)
#   REWARD   Python file with reward_func, such as examples/python/reward_gsm8k.py
#
# With --dry_run among the words only the configuration is checked, without GPUs, Ray or weights (a config.json will do).
#
# Variables that you may set:
#   FORWARD          names of environment variables that the nodes get too; NAME_* is a pattern. By default they get
#                    those of DEFAULT_FORWARD below, and no others of yours
#   DRIVER_RESTARTS  how often a driver that was killed starts again from its last checkpoint   (default: 3)
#   DRIVER_END_S     longest time that a driver may take to save and end after SIGTERM, above ckpt.grace_s + 30
#                                                                                               (default: 120)
#   NODE_RESTARTS    how often a node whose Ray has ended joins again                           (default: 3)
#   NODES_WAIT_S     longest wait for all nodes to join                                         (default: 600)
#   NODE_GPUS        GPUs of each node                          (default: as many as nvidia-smi lists)
#   RAY_PORT         port of Ray's head                         (default: 6379)
#
# In the run folder, that of logger.metrics_path: logs/driver.log, logs/NODE.log (what Ray on a node says), logs/NODE/
# (every process there: worker-*-PID.err). Which process a rank or an engine is: the event "ready" in events.jsonl.

DEFAULT_FORWARD="NCCL_* GLOO_* UCX_* NVTE_* VLLM_* RAY_* HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE OMP_NUM_THREADS WANDB_MODE
    CUDA_DEVICE_MAX_*"
# a killed process takes its children along in this time, or is killed; RaySession needs up to 10 s
GRACE_S=30

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# the environment of this checkout, or the one that is active
python=${OPENRLHF_EXT_VENV:-$ROOT/.venv}/bin/python
[[ -x $python ]] || python=python
port=${RAY_PORT:-6379}

say() { echo "${0##*/}: $*" >&2; }

# --- processes that carry a mark in their environment, which their children inherit wherever they go ------------------

# marked NAME=VALUE: their ids. The shell that has set the mark is none of them: /proc shows what a process began with.
marked() (
    unset "${1%%=*}"
    grep -lsz "^$1\$" /proc/[0-9]*/environ | cut -d / -f 3 || true
)

# end_marked NAME=VALUE: SIGTERM, then SIGKILL, once to each, also to those that one of them has just started
end_marked() {
    local signal pid pids told deadline
    for signal in TERM KILL; do
        told=' ' deadline=$((SECONDS + GRACE_S))
        while ((SECONDS < deadline)); do
            mapfile -t pids < <(marked "$1")
            ((${#pids[@]})) || return 0
            for pid in "${pids[@]}"; do
                [[ $told == *" $pid "* ]] || kill -s "$signal" "$pid" 2>/dev/null || true
                told+="$pid "
            done
            sleep 0.2
        done
    done
}

# --- the training command ---------------------------------------------------------------------------------------------

usage() {
    sed -n 's/^#   \(bash \|sbatch \)/\1/p' "$0" >&2
    sed -n '8,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    echo "recipes: $(find "$ROOT/configs/recipes" -name '*.yaml' -printf '%f\n' | sed 's/\.yaml$//' | sort | paste -sd ' ')" >&2
    exit 2
}

# Sets `training`, the options of the training command.
read_words() {
    if [[ ${1:-} == --* ]]; then
        training=("$@")
        return
    fi
    (($# >= 4)) && [[ -f $ROOT/configs/recipes/$1.yaml ]] || usage
    training=(--config "$ROOT/configs/recipes/$1.yaml" --actor.model_name_or_path "$2" --data.prompt_dataset "$3"
        --reward.remote_url "$4" "${@:5}")
}

# The dry run: mistakes end here with its report. Sets `run_folder`.
check_words() {
    local about
    [[ " ${training[*]} " != *" --dry_run "* ]] || exec "$python" -m openrlhf_ext.cli.train_ppo_ray "${training[@]}"
    about=$("$python" -m openrlhf_ext.cli.train_ppo_ray "${training[@]}" --dry_run_json) || {
        local status=$?
        ((status == 3)) || exit "$status"  # 3: what is not on this machine could not be looked at
    }
    run_folder=$("$python" -c 'import json, pathlib, sys
print(pathlib.Path(json.load(sys.stdin)["options"]["logger.metrics_path"]).parent)' <<<"$about")
    mkdir -p "$(dirname "$run_folder")"
    [[ -d $run_folder ]] || mkdir -m 700 "$run_folder" # as the run would; it holds prompts
    mkdir -p "$run_folder/logs"
}

# --- commands on nodes ------------------------------------------------------------------------------------------------

# environment NAME=VALUE...: for ray_node.sh --attached: records that end with a zero byte, an empty one at the end.
environment() {
    local name pattern patterns
    read -r -d '' -a patterns <<<"$DEFAULT_FORWARD ${FORWARD:-}" || true
    while read -r name; do
        for pattern in "${patterns[@]}"; do
            # shellcheck disable=SC2053 # a pattern is meant
            if [[ $name == $pattern ]]; then
                printf '%s=%s\0' "$name" "${!name}"
                break
            fi
        done
    done < <(compgen -e)
    printf '%s\0' "$@" "OPENRLHF_EXT_VENV=${OPENRLHF_EXT_VENV:-}" "RAY_PORT=$port" ''
}

# attached LIFELINE NODE ROLE...: ray_node.sh on a node. It ends when its standard input does: with the process LIFELINE,
# however that ends, and over ssh with the connection. Variables travel there too, and the cluster's token: `ps` shows
# the words of a command, Slurm records the environment of a step, and shared storage may be others' too.
attached() {
    on_node "$2" bash "$ROOT/examples/scripts/ray_node.sh" --attached "$PWD" "${@:3}" < <(
        environment "NODE_NAME=$2" "RUN_FOLDER=$run_folder" "NODE_GPUS=${NODE_GPUS:-}" "RAY_ADDRESS=$ray_address" \
            "DRIVER_END_S=${DRIVER_END_S:-}" "${access[@]}"
        exec tail --pid="$1" -f /dev/null
    )
}

# keep_node NODE ROLE...: Ray on a node as long as the run lasts. Where the head's ends, the driver ends too, and so does
# Ray on the other nodes; each is started again, and the driver when all are there.
keep_node() {
    local start=0 status
    while true; do
        status=0
        attached "$nodes_lifeline" "$@" >>"$run_folder/logs/$1.log" 2>&1 || status=$?
        kill -0 "$nodes_lifeline" 2>/dev/null || return 0
        say "Ray on $1 has ended with status $status: $(tail -n 1 "$run_folder/logs/$1.log")"
        if ((start++ >= ${NODE_RESTARTS:-3})); then
            say "$1 joins no more (NODE_RESTARTS)"
            if [[ $2 == head ]]; then
                say "it was the head, without which the run cannot go on; what it said: $run_folder/logs/$1.log"
                kill "$driver_lifeline" 2>/dev/null || true
            fi
            return 1
        fi
        say "$1 joins again"
        sleep 1
    done
}

# on_head WORDS...: python with these words on the head. In the background, since a trap waits for what is not.
on_head() {
    # shellcheck disable=SC2154 # nodes: see above
    attached "$driver_lifeline" "${nodes[0]}" run "$python" "$@" &
    driver=$!
    wait "$driver"
}

# What the nodes of a cluster that is started here have in common, and nobody else: a token, new for each cluster. One
# node alone talks to nobody else: this variable has Ray listen on loopback (ray 2.60 services.py:815).
make_access() {
    access=(RAY_AUTH_MODE=token "RAY_AUTH_TOKEN=$("$python" -c 'import secrets; print(secrets.token_hex(32))')")
    head=${nodes[0]}
    if ((${#nodes[@]} == 1)); then
        access+=(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0)
        head=127.0.0.1
    fi
}

start_nodes() {
    local node role=(head)
    for node in "${nodes[@]}"; do
        keep_node "$node" "${role[@]}" &
        keepers+=($!)
        role=(join "${nodes[0]}")
    done
}

# Waits for the nodes, and looks at each of them.
check_cluster() {
    local wait=()
    if ((starts_nodes)); then wait=(--wait_for "${nodes[@]}" --wait_s "${NODES_WAIT_S:-600}"); fi
    on_head -m openrlhf_ext.cli.doctor --cluster "${wait[@]}" "${training[@]}" && return 0
    say "the cluster cannot hold the run; what its nodes said is in $run_folder/logs"
    return 1
}

# The training command. A status of 128 and more is a signal that killed it (137 also: Ray died under it, or it hung), 255
# an ssh that lost its connection; 129, 130 and 143 are the end of a terminal, Ctrl-C and SIGTERM. Other failures are the
# driver's own matter (train.max_restarts).
drive() {
    local restart=0 status resume
    while true; do
        status=0 resume=()
        # A driver begins its events when it has moved earlier runs' checkpoints aside: those that are there now are its own.
        [[ ! $run_folder/events.jsonl -nt $run_folder/logs/started ]] || resume=(--ckpt.load_enable)
        on_head -m openrlhf_ext.cli.train_ppo_ray "${training[@]}" "${resume[@]}" || status=$?
        ((status > 128 && status != 129 && status != 130 && status != 143)) || return "$status"
        ((restart++ < ${DRIVER_RESTARTS:-3})) || { say "the driver was killed again (status $status)" && return "$status"; }
        say "the driver was killed (status $status): restart $restart of ${DRIVER_RESTARTS:-3} from the last checkpoint"
        if ((starts_nodes)); then check_cluster || return 1; fi
    done
}

# --- the whole --------------------------------------------------------------------------------------------------------

# launch WORDS...: with RAY_ADDRESS set by a script, on that cluster; else Ray is started on `nodes`, and ended. With
# `again` set to another number than 0 an earlier start of the same run is gone on with.
launch() {
    starts_nodes=$((${#ray_address} == 0)) keepers=() driver='' access=()
    read_words "$@"
    check_words
    ((${again:-0})) && [[ -e $run_folder/logs/started ]] || touch "$run_folder/logs/started"
    mark="LAUNCH_MARK=$(hostname).$$.$RANDOM"
    export "${mark?}"
    tail --pid=$$ -f /dev/null &
    nodes_lifeline=$!
    tail --pid=$$ -f /dev/null &
    driver_lifeline=$!
    trap 'end_launch' EXIT
    trap 'interrupted SIGINT 130' INT
    trap 'interrupted SIGTERM 143' TERM
    trap 'interrupted SIGHUP 129' HUP
    if ((starts_nodes)); then
        make_access
        start_nodes
        ray_address=$head:$port
    fi
    check_cluster || exit 1
    drive > >(tee -ai "$run_folder/logs/driver.log") 2>&1 || exit $?
}

interrupted() {
    say "$1: ends the driver, then Ray on all nodes" || true # the terminal may be gone
    exit "$2"
}

# The driver first, so that it saves, and ends its processes itself; then Ray.
end_launch() {
    trap '' INT TERM HUP
    end_lifeline "$driver_lifeline" ${driver:+"$driver"}
    end_lifeline "$nodes_lifeline" "${keepers[@]}"
    end_marked "$mark"
}

# end_lifeline LIFELINE PID...: ends it, and waits for our children that end with it.
end_lifeline() {
    local deadline=$((SECONDS + ${DRIVER_END_S:-120} + 2 * GRACE_S + 10)) pid
    kill "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
    for pid in "${@:2}"; do
        while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
    done
}
