#!/bin/bash
# Any engine on any number of machines under SLURM, through time limits:
#   sbatch accelerate_configs/slurm.sh recipes/dpo_full.yaml [section.key=value ...]
#   CONFIG=accelerate_configs/zero3.yaml sbatch --nodes 4 accelerate_configs/slurm.sh recipes/dpo_full.yaml
#   CONFIG= sbatch ...      torchrun without a config: DDP, or what the recipe says (train.deepspeed)
#
# Five minutes before the limit the launchers get SIGTERM and pass it on; training finishes its step, writes a
# checkpoint and ends; the job goes back to the queue and resumes from there. SLURM itself requeues after a preemption
# or a lost machine. `accelerate launch` of several processes is torchrun with the config's engine in the environment,
# so it forwards SIGTERM as well; that of single.yaml does not: for one GPU, CONFIG= (torchrun).
#SBATCH --job-name=hf_posttrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1          # one launcher a machine, which starts a process for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64           # of a machine; tokenising and data loading use them
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300          # to this script, 5 minutes before the end: a step and a checkpoint must fit
#SBATCH --requeue
#SBATCH --open-mode=append           # one log through all requeues
#SBATCH --output=%x-%j.log
set -euo pipefail

recipe=${1:?usage: sbatch accelerate_configs/slurm.sh RECIPE.yaml [section.key=value ...]}
config=${CONFIG-accelerate_configs/fsdp2.yaml}
gpus=${SLURM_GPUS_ON_NODE:?ask for GPUs, for instance with --gpus-per-node=8}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
host=${hosts%%$'\n'*}                              # the first
port=$((20000 + SLURM_JOB_ID % 10000))            # two jobs may share a machine
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240         # seconds from SIGTERM to SIGKILL; 30 without it, and with older torch

if [[ -n $config ]]; then
  launcher=(accelerate launch --config_file "$config" --num_machines "$SLURM_NNODES"
    --num_processes $((SLURM_NNODES * gpus)) --rdzv_backend c10d --main_process_ip "$host" --main_process_port "$port")
else
  launcher=(torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$gpus"
    --rdzv_backend c10d --rdzv_endpoint "$host:$port" --rdzv_id "$SLURM_JOB_ID")
fi

save_and_requeue() {
  scancel --signal=TERM "$SLURM_JOB_ID"           # to the launchers, not to this script
  wait "$step" && exit 0                          # it was done
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}
trap save_and_requeue USR1

# --cpus-per-task: srun does not take it over from sbatch, and would bind all processes to one core
# --wait: five minutes after one machine has ended, the others end too, instead of waiting for it for ever
srun --wait=300 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${launcher[@]}" -m hf_posttrain.run "$recipe" train.resume_from_checkpoint=auto "${@:2}" &
step=$!
wait "$step"
