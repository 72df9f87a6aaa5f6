"""Problems for training and evaluation: dicts {prompt or messages, answer, reward, id}.

prompt is plain text; messages, where a problem has them, are for models with a chat template. reward names a
verifier in rewards.py, answer is what that verifier compares with.
"""

import functools
import glob
import json
import random
import sys
from datetime import date
from pathlib import Path

from data import countdown
from data.sets import IDS, SETS
from rewards import REWARDS, grade


class DataError(ValueError):
    """What is wrong with the data, where, and what would be right: train.py prints it and exits with 2."""


def names():
    return [*countdown.FORMS, *SETS]


def load(name, split, data_dir=None, left_out=None, **options):
    """The problems of a data set: split "train" to learn from, "test" held out.

    name: one of names(), or a file.jsonl with prompt, answer and reward in every row (it has one split, both to learn
    from and held out). data_dir: a folder of JSONL files with the Hub's field names, used instead of the Hub.
    left_out: a list, to which the ids of problems are added of which the gold answer cannot be graded.
    options: lcb_release, lcb_from, lcb_to (days, as 2024-08-01). Raises DataError."""
    if name in countdown.FORMS:
        return countdown.Generated(name) if split == "train" else countdown.held_out(name, 1024)
    if name.endswith(".jsonl"):
        return own_file(Path(name), left_out)
    if name not in SETS:
        raise DataError(f"--data {name}: there is no such data set; there are {', '.join(names())}, and files that end in .jsonl")
    made, problems, ids = SETS[name], [], set()
    try:
        begin, end = (date.fromisoformat(options.get(key) or day) for key, day in (("lcb_from", "0001-01-01"), ("lcb_to", "9999-12-31")))
    except ValueError as e:
        raise DataError(f"--lcb_from and --lcb_to are days, as 2024-08-01: {e}") from None
    if not data_dir and split not in made.splits:
        raise DataError(f"--data {name} has no {split} split on the Hub, only {', '.join(made.splits)}")
    for number, (place, row) in enumerate(local_rows(made, data_dir) if data_dir else hub_rows(made, split, options)):
        try:
            if "contest_date" in row and not begin <= date.fromisoformat(str(row["contest_date"])[:10]) <= end:
                continue
            problem = made.problem(row)
        except Exception as e:  # whatever a row may hold
            what = f"field {e} is missing" if isinstance(e, KeyError) else str(e)
            raise DataError(f"{place} is not a row of {name}: {what}") from None
        if problem is None:
            continue  # not of this kind
        own = next((str(row[k]) for k in IDS if row.get(k) is not None), str(number))
        problems.append(dict(problem, reward=made.reward, id=own if own not in ids else f"{own}/{number}"))  # some repeat
        ids.add(own)
    return with_right_golds(name, problems, left_out)


def local_rows(made, folder):
    """Rows of the first of a set's local file names that is there, each with the place it stands at."""
    paths = [p for stem in made.local for p in sorted(glob.glob(str(Path(folder, stem + ".jsonl"))))]
    if not paths:
        raise DataError(f"--data_dir {folder} has no {' or '.join(stem + '.jsonl' for stem in made.local)}")
    return json_lines(paths[0])


def json_lines(path):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as e:
                    raise DataError(f"{path}, line {number} is not JSON: {e}") from None
                if not isinstance(row, dict):
                    raise DataError(f"{path}, line {number} is not an object")
                yield f"{path}, line {number}", row


def hub_rows(made, split, options):
    """Rows from the Hub. Sets that are scripts there are read file by file: datasets runs no scripts."""
    from datasets import load_dataset
    try:
        if made.files:
            kind = "parquet" if made.files is not SETS["livecodebench"].files else "json"
            files = [f"hf://datasets/{made.hub}/{name}" for name in made.files(dict(options, split=split))]
            rows = load_dataset(kind, data_files=files, split="train", streaming=True)
        else:
            rows = load_dataset(made.hub, made.config, split=made.splits[split])
    except Exception as e:  # the Hub's errors are of many classes; the sentence is the same
        raise DataError(f"{made.hub} cannot be loaded from the Hub: {str(e).splitlines()[0]} (--data_dir FOLDER takes local files)") from None
    return ((f"{made.hub}, row {number}", row) for number, row in enumerate(rows))


def own_file(path, left_out=None):
    """A file.jsonl of one's own: {prompt or messages, answer, reward, (id)} in every row."""
    if not path.is_file():
        raise DataError(f"--data {path}: there is no such file")
    problems = []
    for place, row in json_lines(path):
        if missing := {"answer", "reward"} - set(row) or ({"prompt"} if not {"prompt", "messages"} & set(row) else None):
            raise DataError(f"{place} has no field {', '.join(sorted(missing))}: a row is {{prompt or messages, answer, reward}}")
        if str(row["reward"]) not in REWARDS:
            raise DataError(f"{place}: reward {row['reward']!r} is none of {', '.join(REWARDS)}")
        try:
            prompt = row["prompt"] if "prompt" in row else row["messages"][-1]["content"]
            problems.append({**row, "prompt": prompt + "", "id": str(row.get("id", len(problems)))})
        except (TypeError, LookupError):
            raise DataError(f"{place}: prompt is a text, or messages a list of {{role, content}}") from None
    if not problems:
        raise DataError(f"{path} is empty")
    if len({p["id"] for p in problems}) < len(problems):
        raise DataError(f"{path}: two rows have the same id")
    return with_right_golds(str(path), problems, left_out)


def with_right_golds(name, problems, left_out=None):
    """The problems of which the gold answer grades itself right; the others are named."""
    rewards, _ = grade([dict(p, reward="gold_" + p["reward"]) for p in problems], [[""] for _ in problems])
    for p, (right,) in zip(problems, rewards):
        if not right:
            if left_out is not None:
                left_out.append(p["id"])
            print(f"{name}: left out {p['id']}, its gold answer cannot be graded: {str(p['answer'])[:200]!r}", file=sys.stderr)
    if not (kept := [p for p, (right,) in zip(problems, rewards) if right]):
        raise DataError(f"{name}: no problem is left{' between --lcb_from and --lcb_to' if not problems else ''}")
    return kept


@functools.lru_cache(maxsize=4)
def order(size, seed, epoch):
    """The order in which an epoch goes through `size` problems."""
    return random.Random(f"{seed} {epoch}").sample(range(size), size)


def batch(problems, n, seed, rollout, attempt=0):
    """The n problems of a rollout, a function of (seed, rollout): resuming needs no replay.

    attempt > 0 are other problems for the same rollout, to refill it from."""
    start = (attempt * 10**7 + rollout) * n
    places = [divmod(start + i, len(problems)) for i in range(n)]
    return [problems[order(len(problems), seed, epoch)[place]] for epoch, place in places]


# ---------------------------------------------------------------------------- prompts

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
R1_ZERO = ("A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant first thinks "
           "about the reasoning process in the mind and then provides the User with the answer. The reasoning process is enclosed within "
           "<think> </think> and answer is enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
           "</think> <answer> answer here </answer>.{extra}\nUser: {question}\nAssistant: <think>")
ORZ = (" You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final answer will be "
       "extracted automatically by the \\boxed{} tag. This is the problem:")
TEMPLATES = ("chat", "qwen_boxed", "r1_zero", "orz", "none")


def decode(tokenizer, completion, prompt=()):
    """The text of a sampler.Completion without its end-of-sequence token; any other special token stays to be seen. A
    <think> that the prompt (ids) ends with belongs to it: a verifier has to know that thinking had begun."""
    begun = "<think>" * tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")
    return begun + tokenizer.decode(completion.tokens if completion.truncated else completion.tokens[:-1])


def encode(tokenizer, problem, template=None):
    """The token ids of a problem's prompt. template: one of TEMPLATES; None is, where the tokenizer has a
    chat template, qwen_boxed for mathematics and chat for the rest, else none."""
    messages = problem.get("messages") or [dict(role="user", content=problem["prompt"])]
    if template is None:
        own = "qwen_boxed" if problem["reward"] == "math" and "messages" not in problem else "chat"
        template = own if tokenizer.chat_template else "none"
    if template in ("r1_zero", "orz"):
        return tokenizer.encode(R1_ZERO.format(extra=ORZ if template == "orz" else "", question=problem["prompt"]))
    if template == "none":
        return tokenizer.encode(problem["prompt"])
    if template == "qwen_boxed":
        messages = [dict(role="system", content=BOXED), dict(role="user", content=problem["prompt"])]
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)  # ChatML, Qwen's form
    return tokenizer.encode(turns + "<|im_start|>assistant\n")
