"""init: a first sweep file, and a first benchmark of one's own."""

from __future__ import annotations

import argparse

from latent_sweep.commands.command import Commands, add_command
from latent_sweep.security import printable

PURPOSES = ("quickstart", "lambda", "rank", "router", "seeds", "methods")


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    init = add_command(
        commands,
        "init",
        _init,
        "write a commented sweep file for a backbone and a question",
        "init lambda.yaml --purpose lambda --backbone t5-large --benchmark superni",
        "Write a commented sweep file, and with --own a benchmark beside it, whose two small tasks are there to be "
        "replaced. No file is replaced.",
    )
    init.add_argument("sweep", metavar="NAME", help="the sweep's name, or the path of its file")
    init.add_argument(
        "--purpose",
        choices=PURPOSES,
        default="quickstart",
        help="what varies: two settings in five minutes on a CPU (quickstart, default), the weight of the penalty "
        "(lambda), the rank, the router, the seed, or the method, each with a rate that suits it (methods)",
    )
    init.add_argument("--backbone", default="smollm2-135m", help="as in a sweep file; default: %(default)s")
    what = init.add_mutually_exclusive_group()
    what.add_argument(
        "--benchmark",
        default="builtin",
        help="superni, long_sequence, builtin (default), or the folder of one of your own",
    )
    what.add_argument("--own", action="store_true", help="write a benchmark of your own, too: the folder NAME_tasks")


def _init(options: argparse.Namespace) -> int:
    from latent_sweep.errors import ConfigError
    from latent_sweep.settings import local_path
    from latent_sweep.store.files import write_file
    from latent_sweep.sweep.starting import NOTHING_TO_EXPECT, benchmark_files, has_random_weights, sweep_text

    path = local_path(options.sweep)
    if path.suffix not in (".yaml", ".yml"):
        path = path.with_name(f"{path.name}.yaml")
    own = path.with_name(f"{path.stem}_tasks")
    for there in (path, own) if options.own else (path,):
        if there.exists():
            raise ConfigError(f"{there}: is there already; remove it, or name another sweep")
    text = sweep_text(str(path), options.backbone, options.benchmark, options.purpose)
    if options.own:
        for name, content in benchmark_files().items():
            write_file(own / name, content.encode())
        text = sweep_text(str(path), options.backbone, str(own), options.purpose)
    write_file(path, text.encode())
    told = [f"wrote {path}", *([f"wrote {own}: put your own tasks in their place"] if options.own else [])]
    told += [f"{options.backbone} has {NOTHING_TO_EXPECT}"] if has_random_weights(options.backbone) else []
    print(printable("\n".join([*told, f"next: latent-sweep plan {path}"])))
    return 0
