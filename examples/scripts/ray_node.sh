#!/usr/bin/env bash
# Makes this node part of a Ray cluster and stays in the foreground; Ctrl-C takes the node out again.
#
#   bash examples/scripts/ray_node.sh head              on the first node
#   bash examples/scripts/ray_node.sh join HEAD         on every other node; HEAD = name or address of the first one
#
# Ray hands its environment to every process of a run, so what NCCL should know (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, ...)
# and HF_HOME are exported before this is started, the same on all nodes.
#
# Variables that you may set:
#   RAY_PORT   port of the head   (default: 6379)
#   NODE_GPUS  GPUs of this node  (default: as many as nvidia-smi lists)

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
ray=${OPENRLHF_EXT_VENV:-$ROOT/.venv}/bin/ray
[[ -x $ray ]] || ray=ray
port=${RAY_PORT:-6379}

case "${1:-} $#" in
    "head 1") role=(--head --port "$port") ;;
    "join 2") role=(--address "$2:$port") ;;
    *)
        sed -n '4,5s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac

gpus=${NODE_GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)}
if ((gpus == 0)); then
    echo "ray_node.sh: nvidia-smi lists no GPU on $(hostname); set NODE_GPUS to count some all the same" >&2
    exit 1
fi

# Megatron's advice for tensor parallelism before Blackwell: communication is launched in the order of the program
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec "$ray" start "${role[@]}" --num-gpus "$gpus" --disable-usage-stats --block
