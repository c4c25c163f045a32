#!/usr/bin/env bash
#SBATCH --job-name=openrlhf_ext
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# A recipe as one Slurm job: Ray on every node of the allocation, then train_recipe.sh on the first one.
#
#   sbatch [--nodes N] examples/scripts/slurm_recipe.sh RECIPE MODEL DATA REWARD [--entity.name value ...]
#
# Submit it from the root of the checkout, which all nodes see. Arguments are those of train_recipe.sh.

set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?this script is started by sbatch}"
bash examples/scripts/train_recipe.sh "$@" --dry_run >/dev/null # mistakes end the job before Ray starts
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
start() { srun --overlap --nodes 1 --ntasks 1 --nodelist "$1" bash examples/scripts/ray_node.sh "${@:2}" & }

start "${nodes[0]}" head
for node in "${nodes[@]:1}"; do start "$node" join "${nodes[0]}"; done

export RAY_ADDRESS=${nodes[0]}:${RAY_PORT:-6379}
status=0
# the first node waits for its own Ray; the run itself waits for the GPUs of the others (vllm.start_timeout_s)
srun --overlap --nodes 1 --ntasks 1 --nodelist "${nodes[0]}" --export ALL bash -c '
    for _ in $(seq 60); do (exec 3<>"/dev/tcp/${RAY_ADDRESS%:*}/${RAY_ADDRESS#*:}") 2>/dev/null && break; sleep 2; done
    exec bash examples/scripts/train_recipe.sh "$@"' _ "$@" || status=$?
kill $(jobs -p) 2>/dev/null || true
exit "$status"
