"""The command init."""

from __future__ import annotations

import argparse

from latent_sweep.cli.command import Commands, add_command
from latent_sweep.security import printable

PURPOSES = ("quickstart", "lambda", "rank", "router", "seeds", "methods")


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    init = add_command(
        commands,
        "init",
        _init,
        "write a commented sweep file for a backbone and a question",
        "init lambda.yaml --purpose lambda --backbone t5-large --benchmark superni",
        "Write a commented sweep file, and with --own a benchmark next to it with two small tasks to replace by your "
        "own. No file is overwritten.",
    )
    init.add_argument("sweep", metavar="NAME", nargs="?", help="the sweep's name, or the path of its file")
    init.add_argument("--list", action="store_true", help="list the sweep files that come with the package")
    init.add_argument("--copy", metavar="SWEEP", help="copy one of them instead, e.g. table1")
    init.add_argument(
        "--purpose",
        choices=PURPOSES,
        default="quickstart",
        help="what to vary: two settings in five minutes on a CPU (quickstart, default), the weight of the penalty "
        "(lambda), the rank, the router, the seed, or the method, each with a suitable learning rate (methods)",
    )
    init.add_argument("--backbone", default="smollm2-135m", help="as in a sweep file; default: %(default)s")
    data = init.add_mutually_exclusive_group()
    data.add_argument(
        "--benchmark",
        default="builtin",
        help="superni, long_sequence, builtin (default), or the folder of your own benchmark",
    )
    data.add_argument("--own", action="store_true", help="also write a benchmark to fill in: the folder NAME_tasks")


def _init(options: argparse.Namespace) -> int:
    from latent_sweep.data.faults import unknown_name
    from latent_sweep.errors import ConfigError
    from latent_sweep.settings import local_path
    from latent_sweep.storage.files import write_file
    from latent_sweep.sweep.templates import (
        NOTHING_TO_EXPECT,
        benchmark_files,
        first_comment,
        has_random_weights,
        packaged_sweeps,
        sweep_text,
    )

    packaged = packaged_sweeps()
    if options.list:
        width = max(map(len, packaged), default=0)
        print("\n".join(f"{name:{width}}  {first_comment(file)}" for name, file in packaged.items()))
        return 0
    if options.copy is not None and options.copy not in packaged:
        message = unknown_name(options.copy, packaged, "sweep")
        raise ConfigError(f"--copy: {message}; there are {', '.join(packaged)}")
    if (name := options.sweep or options.copy) is None:
        raise ConfigError("init: found no name; give the sweep's name, or --list to see the sweep files of the package")
    path = local_path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = path.with_name(f"{path.name}.yaml")
    own = path.with_name(f"{path.stem}_tasks")
    if options.copy is not None and options.own:
        raise ConfigError("--copy: found --own, too; a copied sweep has its benchmark, so leave one of the two out")
    for target in (path, own) if options.own else (path,):
        if target.exists():
            raise ConfigError(f"{target}: already exists; remove it, or choose another name")
    if options.copy is not None:
        text = packaged[options.copy].read_text(encoding="utf-8")
    else:
        text = sweep_text(str(path), options.backbone, options.benchmark, options.purpose)
    if options.own:
        for name, content in benchmark_files().items():
            write_file(own / name, content.encode())
        text = sweep_text(str(path), options.backbone, str(own), options.purpose)
    write_file(path, text.encode())
    lines = [f"wrote {path}", *([f"wrote {own}: replace its tasks by your own"] if options.own else [])]
    lines += [f"{options.backbone} has {NOTHING_TO_EXPECT}"] if has_random_weights(options.backbone) else []
    print(printable("\n".join([*lines, f"next: latent-sweep plan {path}"])))
    return 0
