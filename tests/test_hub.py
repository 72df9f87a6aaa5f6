"""The Hub, tried: every set and a model come through the real clients from a server that speaks
its protocol (tests/hub.py): cold, from the cache, offline. And what goes wrong is one sentence."""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from conftest import ROOT
from data import hub as hub_reads
from data.sets import SETS
from hub import TOKEN, Hub
from test_sets import ROWS

SHARED = ROOT.parent / "shared" / "benchmarks"
LOCAL = dict(  # the sets of which rows may lie in SHARED
    orz="orz_math_57k_sample", hitab="hitab_test_sample", aime24="aime_2024", aime25="aime_2025",
    aime26="aime_2026", amc23="amc_2023", amc="amc_2022_2023", math500="math500",
    minerva="minerva_math", olympiad="olympiadbench", livecodebench="livecodebench_sample")


def parquet(rows):
    file = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=2)
    return file.getvalue()


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def card(**configs):
    """A repository's README: the header that says which files each config and split have."""
    text = "".join(
        f"- config_name: {config}\n  data_files:\n" + "".join(
            f"  - split: {split}\n    path: {path}\n" for split, path in splits.items())
        for config, splits in configs.items())
    return f"---\nlicense: mit\n{'configs:' if configs else ''}\n{text}---\n# A data set\n".encode()


def shards(folder, split, rows, number, suffix=""):
    """rows spread over `number` parquet files, named as push_to_hub does."""
    return {f"{folder}/{split}-{i:05}-of-{number:05}{suffix}.parquet":
            parquet(rows[i * len(rows) // number:(i + 1) * len(rows) // number])
            for i in range(number)}


def made(name, split, number=4):
    """Rows of a set in its Hub's fields."""
    if LOCAL.get(name) and (SHARED / f"{LOCAL[name]}.jsonl").exists():
        rows = map(json.loads, (SHARED / f"{LOCAL[name]}.jsonl").read_text().splitlines()[:12])
        return [{field: row[field] for field in row if not field.endswith("_checked")}
                for row in rows]
    row, _ = ROWS[name]
    ids = [field for field in row if field in ("id", "problem_idx", "question_id", "unique_id")]
    first = 1 if split == "train" else 101
    return [{**row, **{field: type(row[field])(i) for field in ids}}
            for i in range(first, first + number)]


def as_text(row):
    """A HiTab row as kasnerz/hitab has it: every value is Python's str of it."""
    return {**{field: str(value) for field, value in row.items() if field != "table"},
            "table_content": str(row["table"])}


def contest_infos(train, test):
    """The file in which code_contests declares its fields and its numbers of rows."""
    text = dict(dtype="string", _type="Value")
    cases = dict(feature=dict(input=text, output=text), _type="Sequence")
    language = dict(names=["UNKNOWN_LANGUAGE", "PYTHON"], _type="ClassLabel")
    features = dict(
        description=text, public_tests=cases, private_tests=cases, generated_tests=cases,
        solutions=dict(feature=dict(solution=text, language=language), _type="Sequence"))
    splits = {split: dict(name=split, num_bytes=1, num_examples=number) for split, number in
              (("train", len(train)), ("test", len(test)), ("valid", len(train)))}
    return json.dumps({"deepmind--code_contests": dict(features=features, splits=splits)}).encode()


def layouts(rows):
    """-> {set: {path: bytes}}, laid out as the repositories are. rows: {(set, split): rows}."""
    def both(name):
        return rows[name, "train"], rows[name, "test"]

    def test(name):
        return rows[name, "test"]
    lcb, orz = test("livecodebench"), rows["orz", "train"]
    parts = [lcb[i * len(lcb) // 6:(i + 1) * len(lcb) // 6] for i in range(6)]
    pairs = [[row["0"], row["1"]] for row in orz]
    solutions = dict(solution=["print(1)"] * 50, language=[1] * 50)
    contests, contest_tests = ([dict(row, solutions=solutions) for row in part]
                               for part in both("code_contests"))
    taco, taco_tests = both("taco")
    olympiad = "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet"
    code = [dict(row, ability="code", data_source="taco") for row in rows["eurus_code", "train"]]
    other = dict(code[0], ability="math", reward_model=dict(ground_truth="4", style="rule"))
    return dict(
        orz={"README.md": card(), "orz_math_57k_collection.json": json.dumps(pairs).encode()},
        deepscaler={"README.md": card(),
                    "deepscaler.json": json.dumps(rows["deepscaler", "train"], indent=2).encode()},
        math={"README.md": card(algebra=dict(train="algebra/train-*", test="algebra/test-*"),
                                default=dict(train="data/train-*", test="data/test-*")),
              **shards("algebra", "train", rows["math", "train"][:1], 1),
              **shards("algebra", "test", rows["math", "test"][:1], 1),
              **shards("data", "train", rows["math", "train"], 1),
              **shards("data", "test", rows["math", "test"], 1)},
        gsm8k={"README.md": card(main=dict(train="main/train-*", test="main/test-*"),
                                 socratic=dict(train="socratic/train-*", test="socratic/test-*")),
               **shards("main", "train", rows["gsm8k", "train"], 1),
               **shards("main", "test", rows["gsm8k", "test"], 1),
               **shards("socratic", "train", rows["gsm8k", "train"][:1], 1),
               **shards("socratic", "test", rows["gsm8k", "test"][:1], 1)},
        hitab={"README.md": card(),
               **shards("data", "train", list(map(as_text, rows["hitab", "train"])), 1, "-1a2b"),
               **shards("data", "validation", list(map(as_text, rows["hitab", "test"]))[:1], 1,
                        "-1a2b"),
               **shards("data", "test", list(map(as_text, rows["hitab", "test"])), 1, "-1a2b")},
        code_contests={
            "README.md": card(), "dataset_infos.json": contest_infos(contests, contest_tests),
            **shards("data", "train", contests, 3, "-e9"),
            **shards("data", "valid", contests, 1, "-e9"),
            **shards("data", "test", contest_tests, 1, "-9c")},
        taco={"README.md": card(ALL=dict(train="ALL/train-*", test="ALL/test-*")),
              "TACO.py": b"raise SystemExit('a script')", "train/data-00000-of-00009.arrow": b"?",
              **shards("ALL", "train", [dict(row, solutions="[1]") for row in taco], 9),
              **shards("ALL", "test", [dict(row, solutions="[1]") for row in taco_tests], 1)},
        eurus_code={"README.md": card(default=dict(train="data/train-*",
                                                   validation="data/validation-*")),
                    **shards("data", "train", [other, *code], 2),
                    **shards("data", "validation", code + [other], 1)},
        aime24={"README.md": card(default=dict(train="data/train-*")),
                **shards("data", "train", test("aime24"), 1)},
        aime25={"README.md": card(), "test.jsonl": lines(test("aime25"))},
        aime26={"README.md": card(default=dict(train="data/train-*")),
                **shards("data", "train", test("aime26"), 1)},
        amc23={"README.md": card(), **shards("data", "test", test("amc23"), 1)},
        amc={"README.md": card(default=dict(train="data/train-*")),
             **shards("data", "train", test("amc"), 1)},
        math500={"README.md": card(), "test.jsonl": lines(test("math500"))},
        minerva={"README.md": card(), "test.jsonl": lines(test("minerva"))},
        olympiad={"README.md": card(OE_TO_maths_en_COMP=dict(train=olympiad),
                                    TP_TO_maths_en_COMP=dict(train=olympiad.replace("OE", "TP"))),
                  olympiad: parquet(test("olympiad")),
                  olympiad.replace("OE", "TP"): parquet(test("olympiad")[:1])},
        livecodebench={"README.md": card(), "code_generation_lite.py": b"raise SystemExit('no')",
                       **{f"test{i + 1 if i else ''}.jsonl": lines(part)
                          for i, part in enumerate(parts)}})


@pytest.fixture(scope="module")
def rows():
    return {(name, split): made(name, split, 9) for name, spec in SETS.items()
            for split in spec.splits}


@pytest.fixture(scope="module")
def weights(small):
    """The files of a small model."""
    return {path.name: path.read_bytes() for path in Path(small()).iterdir()}


@pytest.fixture(scope="module")
def hub(rows, weights):
    with Hub() as server:
        for name, files in layouts(rows).items():
            server.add("datasets", SETS[name].hub, files)
        server.add("models", "lab/small", weights)
        yield server


def run(code, url, home, **settings):
    """Runs Python code in a process of its own, its Hub at `url`, its cache in `home`. -> what it
    prints, JSON line by line, and its stderr."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env.update(HF_ENDPOINT=url, HF_HOME=str(home), HF_HUB_DISABLE_PROGRESS_BARS="1",
               HF_DATASETS_DISABLE_PROGRESS_BARS="1", PYTHONPATH=str(ROOT), **settings)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines())), done.stderr


SETS_OF_HUB = """
import json
import data
from data import hub as hub_reads
from data.sets import SETS
for name, spec in SETS.items():
    for split in spec.splits:
        print(json.dumps([name, split, data.load(name, split)]))
"""
MODEL_OF_HUB = """
from transformers import AutoTokenizer
from engine.loading import build, eos_ids, positions_of
tokenizer = AutoTokenizer.from_pretrained("lab/small")
eos = eos_ids("lab/small", tokenizer)
model = build("lab/small", eos)
text = tokenizer.decode(tokenizer.encode("<answer>1+1</answer>"))
print(json.dumps(["model", text, eos, positions_of("lab/small"),
                  model.lm_head.weight.double().sum().item()]))
"""


@pytest.fixture(scope="module")
def loads(hub, tmp_path_factory):
    """{"cold", "warm" or "offline": what was printed, stderr, the requests, bytes sent}, and
    "home": the cache."""
    results = dict(home=tmp_path_factory.mktemp("home"))
    both = SETS_OF_HUB + MODEL_OF_HUB
    for name, code, settings in (("cold", both, {}), ("warm", SETS_OF_HUB, {}),
                                 ("offline", both, dict(HF_HUB_OFFLINE="1"))):
        hub.requests.clear()
        hub.sent = 0
        printed, errors = run(code, hub.url, results["home"], **settings)
        results[name] = printed, errors, list(hub.requests), hub.sent
    return results


@pytest.mark.parametrize("when", ["cold", "warm", "offline"])
def test_every_set_comes_from_the_hub(when, loads, rows):
    printed, errors, _, _ = loads[when]
    problems = {(name, split): got for name, split, got in printed[:len(rows)]}
    assert set(problems) == set(rows) and len(problems) > len(SETS) == 17
    for (name, split), got in problems.items():
        spec = SETS[name]
        expected = json.loads(json.dumps([spec.problem(row) for row in rows[name, split]]))
        assert [{field: p[field] for field in p if field not in ("id", "reward")}
                for p in got] == expected, (name, split)
        assert len({p["id"] for p in got}) == len(got) and {p["reward"] for p in got} == {
            spec.reward}
    assert "left out" not in errors


def test_a_data_file_is_fetched_once(loads):
    _, _, requests, sent = loads["cold"]
    large = [path for method, path in requests if method == "GET" and path.startswith("/cdn/")]
    assert sent > 100_000 and len(large) == len(set(large)) > 20
    assert loads["warm"][3] == 0 and loads["warm"][2]  # it asks, and nothing is sent again
    assert loads["offline"][2:] == ([], 0)


def test_a_script_is_never_fetched(loads):
    assert not [path for method, path in loads["cold"][2] if method == "GET" and ".py" in path]


def test_a_model_comes_from_the_hub(loads, small):
    from engine.loading import head_of
    total = head_of(small()).double().sum().item()
    for when in ("cold", "offline"):
        name, text, eos, positions, head = loads[when][0][-1]
        assert (name, text, eos, positions) == ("model", "<answer>1+1</answer>", [1], 4096)
        assert head == pytest.approx(total, abs=1e-9)


# ------------------------------------------------------------------ what goes wrong

SENTENCES = {  # what a user reads, by fault
    "missing": "has no such repository, or it is private: .*`hf auth login` or set HF_TOKEN",
    "gated": "is gated: accept the conditions .*`hf auth login` or set HF_TOKEN",
    "refused": "is gated: accept the conditions .*`hf auth login` or set HF_TOKEN",
    "token": "does not take the token: .*`hf auth login`, or correct HF_TOKEN",
    "down": "answers 503: try again later|does not answer",
    "breaks": "broke off in the middle of a file: try again",
    "slow files": "at http://127.0.0.1:[0-9]+ does not answer, and the cache lacks it",
    "slow": r"at http://127.0.0.1:[0-9]+ does not answer \(.*Timeout.*\), and the cache lacks it",
}
FAULTS = """
import json, sys, time
import data, data.hub
from data.sets import Set, SETS, gsm8k
from huggingface_hub import constants
time.sleep = lambda seconds: None  # how long the clients wait between tries is not the point here
constants.DOWNLOAD_CHUNK_SIZE = 100  # what has come of a file counts in pieces of this size
files = ["data/test-00000-of-00001.parquet"]
for fault in json.loads(%r):
    name = f"lab/{fault.replace(' ', '_')}"
    SETS["table"] = Set(name, (), gsm8k, splits={"test": "test"})
    SETS["files"] = Set(name, (), gsm8k, splits={"test": "test"}, files=lambda options: files)
    for kind in ("files",) if fault == "slow files" else ("files", "table"):
        try:
            print(json.dumps([fault, kind, len(data.load(kind, "test"))]))
        except data.DataError as e:
            print(json.dumps([fault, kind, str(e)]))
    try:
        if fault != "slow files":
            data.hub.reach(name, "model")
            from transformers import AutoModelForCausalLM
            model = AutoModelForCausalLM.from_pretrained(name)
            print(json.dumps([fault, "model", model.config.num_hidden_layers]))
    except Exception as e:
        print(json.dumps([fault, "model", data.hub.reason(e)]))
"""


def damaged(rows, weights, faults):
    """A Hub with a data set and a model for each fault, lab/FAULT."""
    files = {"README.md": card(), **shards("data", "test", rows["gsm8k", "test"], 1)}
    server = Hub()
    for fault in faults:
        if fault != "missing":
            name = f"lab/{fault.replace(' ', '_')}"
            server.add("datasets", name, files, fault)
            server.add("models", name, weights, fault)
    return server


def test_what_goes_wrong_is_a_sentence(rows, weights, tmp_path):
    """Last in the process comes the Hub that does not answer: the process then asks no more."""
    faults = ["token opens", "breaks once", *SENTENCES]
    with damaged(rows, weights, faults) as server:
        printed, errors = run(FAULTS % json.dumps(faults), server.url, tmp_path, HF_TOKEN=TOKEN,
                              HF_HUB_ETAG_TIMEOUT="1", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert printed[:6] == [[fault, *line] for fault in faults[:2]
                           for line in (["files", 9], ["table", 9], ["model", 2])]
    assert "resume" in errors  # what broke off once
    assert len(printed[6:]) == 3 * len(SENTENCES) - 2
    for fault, kind, sentence in printed[6:]:
        assert re.search(SENTENCES[fault], sentence), (fault, kind, sentence)
        assert "\n" not in sentence and len(sentence) < 300
        if kind != "model":
            assert sentence.startswith("lab/") and "--data_dir FOLDER takes local" in sentence


def test_the_reason_of_any_other_error_is_its_first_paragraph():
    assert hub_reads.reason(ValueError("It looks\nbad.\n\nSee there.")) == "It looks bad."
    assert hub_reads.reason(KeyError()) == "KeyError"
    try:
        try:
            raise TimeoutError("of something else")
        except TimeoutError:
            raise ValueError("the file is not JSON") from None
    except ValueError as e:
        assert hub_reads.reason(e) == "the file is not JSON"  # no cause that its author left out


CACHED = """
import data
print(json.dumps([len(data.load(name, "test")) for name in ("gsm8k", "taco", "livecodebench")]))
data.hub.reach("lab/small", "model")
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained("lab/small")
print(AutoModelForCausalLM.from_pretrained("lab/small").config.num_hidden_layers)
"""


def test_nobody_listens(loads, tmp_path):
    """At a port behind which nobody is: what the cache lacks is said at once, what it has is read,
    and nobody is asked a second time."""
    code = FAULTS.replace("time.sleep =", "sleep =") % json.dumps(["away"]) + CACHED
    start = time.monotonic()
    (*sentences, counts, layers), errors = run(code, "http://127.0.0.1:9", loads["home"])
    assert [sentence[:2] for sentence in sentences] == [
        ["away", kind] for kind in ("files", "table", "model")]
    assert all("at http://127.0.0.1:9 does not answer (ConnectError: " in sentence
               for *_, sentence in sentences)
    assert counts == [9, 9, 12 if (SHARED / "livecodebench_sample.jsonl").exists() else 9]
    assert layers == 2 and "Retrying" not in errors and time.monotonic() - start < 240


def test_offline_with_an_empty_cache(tmp_path):
    code = FAULTS.split("    try:\n        if fault")[0] % json.dumps(["away"])  # without a model
    printed, errors = run(code, "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert len(printed) == 2 and "Retrying" not in errors
    for *_, sentence in printed:
        assert "not in the cache, and HF_HUB_OFFLINE forbids to fetch it" in sentence


def test_a_command_says_it_in_a_sentence(tmp_path):
    env = dict(os.environ, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path),
               HF_HUB_OFFLINE="0", OMP_NUM_THREADS="1", NO_PROXY="127.0.0.1,localhost")
    command = [sys.executable, "train.py", "--data", "gsm8k", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    said, = done.stderr.splitlines()
    assert done.returncode == 2 and said.startswith("train.py: openai/gsm8k cannot be loaded")
    assert "127.0.0.1:9 does not answer" in said
