"""python -m analysis watch: curves.png of runs that go on, drawn anew until Ctrl-C."""

import fnmatch
import os
import time
from pathlib import Path

from analysis.flags import beside, refuse


def watched(paths):
    """-> the paths to look at again and again, and the figure's file where --out names none.

    A shell makes of runs/* the runs that are there now. Where the paths are all that a folder
    holds, the folder is watched in their place, so that runs that appear later are taken in."""
    paths = [Path(path) for path in paths]
    folder = paths[0].parent
    if len(paths) == 1 and paths[0].name == "*" and folder.is_dir():  # there was nothing yet
        return [folder], folder / "curves.png"
    for path in paths:
        if not path.exists():
            refuse(f"{path}: there is no such folder or file; train.py writes a run's folder, "
                   "which its --out names")
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if {path.parent for path in paths} == {folder} and {path.name for path in paths} == there:
        return [folder], folder / "curves.png"
    first = paths[0]
    if len(paths) == 1 and first.is_dir() and not (first / "config.json").exists():
        return paths, first / "curves.png"
    return paths, beside(paths, "watch")


def read_what_is_there(paths, only, say):
    """The runs of the paths that have a record by now, each seed once. A file that cannot be read
    is said: it may be in the middle of being written."""
    from analysis.runs import distinct, find_runs, is_run, read
    runs = []
    for path in filter(is_run, find_runs(paths)):
        try:
            runs += [run for run in read(path) if run["records"]]
        except (OSError, ValueError) as e:
            say(f"left out for now: {e}")
    if only:
        runs = [run for run in runs
                if any(fnmatch.fnmatch(run["name"], pattern) for pattern in only.split(","))]
    return distinct(runs)[0]


def draw(runs, out):
    """Writes the figure aside first: a viewer that reads it meanwhile sees a whole one."""
    from analysis import figures
    from analysis.runs import grouped
    aside = out.with_name(f".{out.name}")
    try:
        figures.curves(grouped(runs), aside)
        os.replace(aside, out)
    except OSError as e:
        refuse(f"{out} cannot be written: {e.strerror}; --out names another file")


def watch(paths, every, only=None, out=None):
    """Draws the curves of the paths' runs whenever they have grown, and looks every `every`
    seconds. Returns at Ctrl-C."""
    paths, default = watched(paths)
    out = Path(out or default)
    said, drawn, counted = set(), None, None

    def say(text):
        if text not in said:
            said.add(text)
            print(f"watch: {text}", flush=True)

    say(f"every {every:g} seconds {out} is drawn anew, if there is something new; Ctrl-C ends it")
    try:
        while True:
            runs = read_what_is_there(paths, only, say)
            now = [(run["path"], run["seed"], len(run["records"])) for run in runs]
            if not runs:
                say("no run there has finished a rollout yet")
            elif now != drawn:
                draw(runs, out)
                drawn = now
                if len(runs) != counted:
                    counted = len(runs)
                    print(f"written: {out}, {counted} run{'s' * (counted > 1)}", flush=True)
            time.sleep(every)
    except KeyboardInterrupt:
        print()
