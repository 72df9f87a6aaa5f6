#!/bin/bash
# Two nodes of eight GPUs. Start it with `sbatch examples/slurm.sh` from the repository's folder. Before
# that, ./run_all.sh has to have made .venv there, and model and data have to be in the Hub's cache.
# Queue it as often as the run needs it: the jobs run one after the other, and each continues where
# the one before it stopped.
#SBATCH --job-name=nanorlvr
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --dependency=singleton
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@900
# Every process gets SIGTERM 15 minutes before the end. It finishes the rollout, saves, and stops.

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK HF_HUB_OFFLINE=1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
# without --kill-on-bad-exit, the end of one rank leaves the others waiting for it
srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE \
  exec .venv/bin/python train.py --model Qwen/Qwen2.5-7B --data orz --eval_data math500 \
  --max_tokens 3072 --loss p3o --steps_per_rollout 16 --out runs/p3o-7b --resume'
