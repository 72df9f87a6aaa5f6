"""data/sources.py: every set, read by `datasets` from folders laid out as the Hub; its errors."""

import io
import json

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet
import pytest

import data
from data import sources
from data.sets import SETS
from test_sets import ROWS


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


def layouts(rows):
    """-> {set: {path: bytes}}, laid out as the repositories are. rows: {(set, split): rows}."""
    def test(name):
        return rows[name, "test"]

    def tables(folder, name, number=None):
        return {path: content for split in ("train", "test") for path, content in
                shards(folder, split, rows[name, split][:number], 1).items()}
    # a HiTab row as kasnerz/hitab has it: every value is Python's str of it
    hitab = {split: [{**{field: str(value) for field, value in row.items() if field != "table"},
                      "table_content": str(row["table"])} for row in rows["hitab", split]]
             for split in ("train", "test")}
    lcb, pairs = test("livecodebench"), [[row["0"], row["1"]] for row in rows["orz", "train"]]
    contests = rows["code_contests", "train"]
    olympiad = "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet"
    found = dict(
        orz={"orz_math_57k_collection.json": json.dumps(pairs).encode()},
        deepscaler={"deepscaler.json": json.dumps(rows["deepscaler", "train"], indent=2).encode()},
        math={"README.md": card(default=dict(train="data/train-*", test="data/test-*")),
              **tables("data", "math")},
        gsm8k={"README.md": card(main=dict(train="main/train-*", test="main/test-*"),
                                 socratic=dict(train="socratic/train-*", test="socratic/test-*")),
               **tables("main", "gsm8k"), **tables("socratic", "gsm8k", 1)},
        hitab={path: content for split, of in (("train", "train"), ("validation", "test"),
                                               ("test", "test")) for path, content in
               shards("data", split, hitab[of], 1, "-1a2b").items()},
        code_contests={
            **shards("data", "train", contests, 3, "-e9"),
            **shards("data", "valid", contests, 1, "-e9"),
            **shards("data", "test", test("code_contests"), 1, "-9c")},
        amc23=shards("data", "test", test("amc23"), 1),
        olympiad={"README.md": card(OE_TO_maths_en_COMP=dict(train=olympiad),
                                    TP_TO_maths_en_COMP=dict(train=olympiad.replace("OE", "TP"))),
                  olympiad: parquet(test("olympiad")),
                  olympiad.replace("OE", "TP"): parquet(test("olympiad")[:1])},
        livecodebench={"code_generation_lite.py": b"raise SystemExit('no')",
                       **{f"test{i + 1 if i else ''}.jsonl": lines(
                           lcb[i * len(lcb) // 6:(i + 1) * len(lcb) // 6]) for i in range(6)}})
    for name in ("aime24", "aime26", "amc"):
        found[name] = {"README.md": card(default=dict(train="data/train-*")),
                       **shards("data", "train", test(name), 1)}
    for name in ("aime25", "math500", "minerva"):
        found[name] = {"test.jsonl": lines(test(name))}
    return {name: {"README.md": card(), **files} for name, files in found.items()}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """-> the folder of the repositories, OWNER/NAME, and {(set, split): rows}."""
    folder, rows = tmp_path_factory.mktemp("hub"), {}
    for name, spec in SETS.items():
        row, _ = ROWS[name]
        ids = {"id", "problem_idx", "question_id", "unique_id"} & {*row}
        for split in spec.splits:
            first = 1 if split == "train" else 101
            rows[name, split] = [{**row, **{field: type(row[field])(i) for field in ids}}
                                 for i in range(first, first + 9)]
    for name, files in layouts(rows).items():
        for path, content in files.items():
            file = folder / SETS[name].hub / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    return folder, rows


@pytest.mark.parametrize("name, split", [(n, split) for n in SETS for split in SETS[n].splits])
def test_every_set_comes_from_the_hub(name, split, repositories, monkeypatch, tmp_path, capsys):
    folder, rows = repositories
    load = datasets.load_dataset
    monkeypatch.setattr(sources, "reach", lambda name: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda repository, *config, **options: load(
        str(folder / repository), *config, cache_dir=str(tmp_path), **options))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, path, repo_type:
                        repo_type == "dataset" and str(folder / repository / path))
    got, spec = data.load(name, split), SETS[name]
    expected = json.loads(json.dumps([spec.problem(row) for row in rows[name, split]]))
    assert got == [dict(problem, id=p["id"], verifier=spec.verifier)
                   for p, problem in zip(got, expected, strict=True)]
    assert len({p["id"] for p in got}) == len(got)
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize("error, said", [
    (ValueError("It looks\nbad.\n\nSee there."), "It looks bad."), (KeyError(), "KeyError"),
    (OSError("a" * 999), "a" * 300),
    (OSError("401 Client Error. (Request ID: 1)\n\nIt is gated.\nPlease log in.\n\nSee there."),
     "It is gated. Please log in.")])
def test_the_reason_is_the_first_paragraph_that_says_something(error, said):
    assert sources.reason(error) == said


def test_a_hub_that_is_silent_or_breaks_off_is_a_sentence_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    said = "http://127.0.0.1:9 does not answer .*; HF_HUB_OFFLINE=1 reads the cache"
    with pytest.raises(ConnectionError, match=said):
        sources.reach("lab/small")
    with pytest.raises(data.DataError, match=f"openai/gsm8k cannot be loaded from the Hub: {said}"):
        data.load("gsm8k", "test")
    sources.reach(str(tmp_path))  # a folder needs no Hub
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    sources.reach("lab/small")

    def rows(*_, **__):
        yield dict(question="?", answer="#### 1")
        raise OSError("the connection\nbroke off\n\nSee there.")
    monkeypatch.setattr(sources, "reach", lambda name: None)
    monkeypatch.setattr(datasets, "load_dataset", rows)
    with pytest.raises(data.DataError, match="^openai/gsm8k cannot be loaded from the Hub: the "
                       "connection broke off .--data_dir FOLDER takes local files.$"):
        data.load("gsm8k", "test")
