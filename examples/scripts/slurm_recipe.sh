#!/usr/bin/env bash
#SBATCH --job-name=openrlhf_ext
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# Trains as one Slurm job: Ray on every node of the allocation, the driver on the first one.
#
#   sbatch [--nodes N] examples/scripts/slurm_recipe.sh RECIPE MODEL DATA REWARD [--entity.name value ...]
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
launch "$@"
