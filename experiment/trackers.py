"""--trackio NAME: Hugging Face's tracker, whose projects are files of this machine.

It is imported where it is asked for. `trackio show --project NAME` opens its dashboard.
"""

import json


def trackio_fault(project):
    """What Trackio has against the name of a project, in its words; None where nothing."""
    from trackio.sqlite_storage import SQLiteStorage
    try:
        SQLiteStorage.validate_project_name(project)
    except ValueError as e:
        return str(e)
    return None


def trackio_mirror(out, args):
    """-> a function that logs a record of numbers to the project args.trackio.

    The run is named by its folder `out` and the start of its id: a resumed run finds itself."""
    import trackio
    config = json.loads((out / "config.json").read_text())
    run = trackio.init(project=args.trackio, name=f"{out.name}-{config['id'][:8]}",
                       config=config["flags"], resume="allow", embed=False, auto_log_cpu=False,
                       auto_log_gpu=False)

    def mirror(record):
        # "step" is Trackio's own name, of the x-axis
        names = {"step": "optimizer_step"}
        run.log({names.get(k, k): v for k, v in record.items()}, step=record["rollout"])
    return mirror
