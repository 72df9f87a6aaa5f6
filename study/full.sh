# ./run_all.sh full: a file of runs of a real model. run_all.sh sources this after the set-up; TRAIN,
# EXTRA, gpus and lock are its own.
# Environment: MODEL, DATA; GRID=file of lines "name  steps...  flags" (as study/full.txt), SEEDS,
# ROLLOUTS, JOBS=runs at a time, RUNS=folder, and BENCHMARKS="aime24,amc23" on which every end model
# is evaluated

runs_of() { # file -> lines "name steps seed flags", a run each, one seed after the other
  local seed name rest steps
  for seed in $SEEDS; do
    grep -v -e '^#' -e '^ *$' "$1" | while read -r name rest; do
      for steps in ${rest%%--*}; do echo "$name $steps $seed --${rest#*--}"; done
    done
  done
}

one_run() { # name steps seed flags
  local out=$RUNS/$1-$2-$3 flags="$COMMON ${*:4} $EXTRA" model
  # shellcheck disable=SC2086
  $TRAIN --steps_per_rollout "$2" --seed "$3" --out "$out" --resume $flags >"$out.log" 2>&1 || {
    echo "$out failed: $(tail -n 1 "$out.log")"
    return 1
  }
  if [ -n "$BENCHMARKS" ]; then
    model=$(ls -d "$out"/checkpoints/rollout_* | tail -n 1)
    .venv/bin/python eval.py --model "$model" --benchmarks "$BENCHMARKS" --samples 8 \
      --max_prompt_tokens 1024 --max_tokens 3072 --out "$out/eval" >>"$out.log" 2>&1 || {
      echo "$out: its evaluation failed: $(tail -n 1 "$out.log")"
      return 1
    }
  fi
  echo "$flags" >"$out/done"
  echo "$out is done"
}

how_long() { # file of runs: times a few rollouts of the first two, and says how long all will take
  local left name steps seed flags out
  left=$(while read -r name steps seed flags; do
    [ -f "$RUNS/$name-$steps-$seed/done" ] || echo
  done <"$1" | wc -l)
  [ "$left" -gt 0 ] || return 0
  head -n 2 "$1" | while read -r name steps seed flags; do
    out=$RUNS/timing-$name-$steps
    rm -rf "$out"
    # shellcheck disable=SC2086
    $TRAIN --steps_per_rollout "$steps" $COMMON $flags ${EXTRA/--force/} --rollouts 3 --eval_every 0 \
      --save_every 0 --out "$out" >"$RUNS/timing.log" 2>&1 </dev/null || {
      echo "run_all.sh: the first run does not work:"
      tail -n 3 "$RUNS/timing.log"
      exit 1
    }
  done || exit 1
  .venv/bin/python bench/how_long.py --runs "$left" --jobs "$JOBS" --rollouts "$ROLLOUTS" \
    --eval_every "$EVAL_EVERY" "$RUNS"/timing-*
  rm -rf "$RUNS"/timing-*
}

run_grid() { # file of lines "name  steps...  flags"
  local folders what
  [ -z "${METHODS:-}${STEPS:-}" ] || {
    echo "run_all.sh: METHODS and STEPS are not for full: GRID=file names other runs than $1" >&2
    exit 2
  }
  lock
  if [ "$JOBS" -gt 1 ]; then export OMP_NUM_THREADS=1; fi # a core each
  runs_of "$1" >"$RUNS/.list" || true
  [ -s "$RUNS/.list" ] || {
    echo "run_all.sh: there is no run in $1" >&2
    exit 2
  }
  export RUNS TRAIN COMMON EXTRA BENCHMARKS
  how_long "$RUNS/.list"
  export -f one_run
  xargs -P "$JOBS" -L 1 bash -c 'one_run "$@"' _ <"$RUNS/.list" || {
    echo "run_all.sh: not all runs were finished; the same command again continues" >&2
    exit 1
  }
  folders=($(awk -v runs="$RUNS" '{print runs "/" $1 "-" $2 "-" $3}' "$RUNS/.list"))
  .venv/bin/python -m analysis table "${folders[@]}" --out "$RUNS/table.md"
  .venv/bin/python -m analysis curves "${folders[@]}" --out "$RUNS/curves.png"
  # runs without evaluations have no pass@k
  .venv/bin/python -m anatomy passk "${folders[@]}" --out "$RUNS/passk.png" || true
}

full() { # ACPO's settings, on all GPUs there are
  : "${MODEL:?give the model, as in MODEL=Qwen/Qwen2.5-3B-Instruct DATA=countdown34 ./run_all.sh full}"
  : "${DATA:?give the problems: countdown34, or orz}"
  RUNS=${RUNS:-runs/$(basename "$MODEL")-$DATA} SEEDS=${SEEDS:-0} JOBS=${JOBS:-1}
  ROLLOUTS=${ROLLOUTS:-200} EVAL_EVERY=10
  if [ "$gpus" -gt 1 ]; then JOBS=1; fi # each run takes them all
  COMMON="--model $MODEL --data $DATA --rollouts $ROLLOUTS --lr 1e-6 --group_size 10"
  COMMON="$COMMON --max_prompt_tokens 1024 --max_tokens 3072 --eval_every $EVAL_EVERY --eval_samples 8"
  if [ "$DATA" = orz ]; then
    COMMON="$COMMON --eval_data math500"
    BENCHMARKS=${BENCHMARKS:-aime24,aime25,amc23,math500,minerva,olympiad}
  fi
  run_grid "${GRID:-study/full.txt}"
}

BENCHMARKS=${BENCHMARKS:-}
full
