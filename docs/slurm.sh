#!/bin/bash
# Two nodes of eight GPUs: sbatch docs/slurm.sh, from the repository's folder. Queue it as often as the run needs:
# each continues where the one before it stopped.
#SBATCH --job-name=nanorlvr
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@900
# 15 minutes before the end every process gets SIGTERM: it finishes the rollout, saves, and stops

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE \
  exec .venv/bin/python train.py --model Qwen/Qwen2.5-7B --data orz --loss p3o --steps_per_rollout 16 --out runs/p3o-7b --resume'
