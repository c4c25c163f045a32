#!/usr/bin/env bash
#SBATCH --job-name=openrlhf_ext
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@180
# Trains as one Slurm job: Ray on every node of the allocation, the driver on the first one.
#
#   sbatch [--nodes N] examples/scripts/slurm_recipe.sh RECIPE MODEL DATA REWARD [--entity.name value ...]
#
# SIGTERM to this script (Slurm's, 180 s before the time limit; yours: scancel --signal=TERM --batch JOB) has the driver save
# a checkpoint and ends the job with status 143. Slurm's own SIGTERM, at the end and to every process, Ray's too, comes
# too late for that. A job that Slurm starts again after a preemption goes on from its last checkpoint.
#
# Submit it from the root of the checkout, which all nodes see: Slurm runs a copy of this file. Words and variables:
# launch.sh.

set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?this script is started by sbatch}"
# shellcheck source=examples/scripts/launch.sh
source examples/scripts/launch.sh
ray_address=
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on_node() { srun --overlap --nodes 1 --ntasks 1 --nodelist "$1" "${@:2}"; }
again=${SLURM_RESTART_COUNT:-0} lock=()
((again == 0)) || lock=(--ckpt.take_over_lock) # it has ended, on whichever node
launch "$@" "${lock[@]}"
