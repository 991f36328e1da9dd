"""doctor and bench: can this machine be trusted with a sweep, and how fast is it?"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from latent_sweep.cli.command import Commands, add_command, add_json, print_json
from latent_sweep.run import add_sweep_arguments


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        "check whether this machine or cluster is ready for a sweep; under two minutes without one",
        "doctor sweeps/lambda.yaml",
        "Check packages, device, storage, tracker and every method, and on a Ray cluster each node; with a sweep file "
        "also its data and one optimizer step of its backbone. Leaves only caches behind that a run "
        "needs anyway. Exit codes: 0 no fault, 1 a fault, 2 it could not be checked.",
    )
    add_sweep_arguments(doctor, optional=True)
    doctor.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: the GPU if there is one"
    )
    doctor.add_argument(
        "--address", metavar="HOST:PORT", help="a Ray cluster whose nodes to check; default: RAY_ADDRESS"
    )
    add_json(doctor)

    bench = add_command(
        commands,
        "bench",
        _bench,
        "measure this machine: against the bare backbone, and the usual way",
        "bench --backbone t5-large --only step packs",
        "Measure this machine: against the bare backbone, and the usual way. Exit codes: 0 done, 1 a part could not be "
        "measured, 2 it could not be carried out, 130 it was interrupted.",
    )
    bench.add_argument("--backbone", default="smollm2-135m", help="as in a sweep file; default: %(default)s")
    bench.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU where there is one")
    bench.add_argument(
        "--dtype", choices=["float32", "bfloat16"], nargs="+", default=[], help="one step is measured with each"
    )
    bench.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PART",
        help="measure only these: step packs history generate evaluate start threads memory sweep store; or tasks, "
        "methods and shards, which take several minutes to an hour and run only when named",
    )
    bench.add_argument(
        "--quick", action="store_true", help="little of everything: shows that it runs, no more; writes no profile"
    )
    add_json(bench)
    bench.add_argument(
        "--storage",
        help="for the profile that `plan` reads, and for what `store` measures; default: that of LATENT_SWEEP_STORAGE, "
        "else runs",
    )


def _doctor(options: argparse.Namespace) -> int:
    from latent_sweep.doctor.examination import examine

    def tell(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    found = examine(options.sweep, options.overrides, options.device, options.address, tell)
    if options.json:
        print_json([asdict(finding) for finding in found])
    return 1 if any(finding.mark == "fault" for finding in found) else 0


def _bench(options: argparse.Namespace) -> int:
    from latent_sweep.bench.run import run_bench
    from latent_sweep.errors import ConfigError, Terminated
    from latent_sweep.storage.storage import default_place, open_storage, place_faults

    place = options.storage or default_place()
    if faults := place_faults(place):
        raise ConfigError(f"--storage: {'; '.join(faults)}")
    report = run_bench(
        options.backbone,
        options.device,
        options.dtype,
        options.only,
        options.quick,
        open_storage(place),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report.json() if options.json else report.text())
    if report.interrupted:
        raise Terminated if report.terminated else KeyboardInterrupt
    return 1 if any(table.failure for table in report.tables) else 0
