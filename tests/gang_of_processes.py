"""Gangs of plain processes, without Ray: what two workers do together, for tests to look at.

    python tests/gang_of_processes.py RANK SIZE PORT JOBS

JOBS is a JSON list of {sweep, engine, folder}: sweeps that the gang runs one after another, each in its folder, where
losses.json then has the terms of the loss at every step; or of {question, file}: what the function of this name answers
at the first worker goes into the file.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_jobs(jobs: Sequence[Mapping[str, Any]], size: int, folder: Path, timeout_seconds: float) -> None:
    """Run jobs with a gang of this size; raises AssertionError with what its workers said where one fails."""
    from latent_sweep.gang import listen

    listening = listen("127.0.0.1")
    port = listening.getsockname()[1]
    listening.close()  # the first worker takes it at once
    path = folder / "jobs.json"
    path.write_text(json.dumps(list(jobs)), encoding="utf-8")
    command = [sys.executable, __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(port), str(path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [worker.communicate(timeout=timeout_seconds)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * size, "\n".join(said)


def main(rank: int, size: int, port: int, jobs: Path) -> None:
    import torch

    from latent_sweep.config import EngineSettings, parse_sweep
    from latent_sweep.engine import engine_of
    from latent_sweep.gang import join
    from latent_sweep.plan import expand, pack
    from latent_sweep.trial import Step, run_pack

    torch.set_num_threads(1)
    gang = join(rank, size, "127.0.0.1", port)
    for job in json.loads(jobs.read_text(encoding="utf-8")):
        if "question" in job:
            answer = {"hand_over": hand_over, "shards": shards}[job["question"]](gang)
            if gang.leads:
                Path(job["file"]).write_text(json.dumps(answer), encoding="utf-8")
            continue
        engine = engine_of(EngineSettings.model_validate(job["engine"]), gang)
        sweep, folder = parse_sweep(job["sweep"], "test"), Path(job["folder"])
        seen: list[Any] = []
        for each in pack(expand(sweep), sweep.run.pack):
            run_pack(each, folder, folder / sweep.name, seen.append, engine=engine)
        if gang.leads:
            losses = [dict(event.losses) for event in seen if isinstance(event, Step) and event.doing == "learning"]
            (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
        gc.freeze()  # DeepSpeed collects garbage for every optimizer; through all modules that is slow
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort an interpreter that ends


def hand_over(gang: Any) -> dict[str, float]:
    """Each engine takes five steps, and every other goes on from its state for five more, beside plain torch's ten.

    Returns:
        By "giver to taker", the largest difference of any parameter.
    """
    import torch

    from latent_sweep.config import EngineSettings, TrainingSettings
    from latent_sweep.engine import Engine, engine_of

    settings = TrainingSettings(learning_rate=0.01, weight_decay=0.1, warmup_steps=2, schedule="linear")
    kinds = [{"zero_stage": stage} for stage in (0, 1, 2, 3)]
    kinds += [{"zero_stage": stage, "offload": "cpu"} for stage in (2, 3)]
    engines = {"torch": Engine(gang)}
    for kind in kinds:
        engines[json.dumps(kind)] = engine_of(EngineSettings.model_validate({"name": "deepspeed", **kind}), gang)

    def begin(engine):
        source = torch.Generator().manual_seed(0)
        parameters = {name: torch.randn(shape, generator=source) for name, shape in {"A": (3, 5), "B": (7,)}.items()}
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        return parameters, engine.optimizer(parameters, settings, 10)

    def go_on(parameters, optimizer, first, last):
        for step in range(first, last):
            source = torch.Generator().manual_seed(100 + step)
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=source)
            optimizer.step()
            optimizer.clear()

    whole, optimizer = begin(engines["torch"])
    go_on(whole, optimizer, 0, 10)
    differences = {}
    for giver, first in engines.items():
        parameters, optimizer = begin(first)
        go_on(parameters, optimizer, 0, 5)
        state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
        for taker, second in engines.items():
            parameters, optimizer = begin(second)
            optimizer.load_state(state)
            go_on(parameters, optimizer, 5, 10)
            found = [(parameters[name] - whole[name]).abs().max().item() for name in whole]
            differences[f"{giver} to {taker}"] = max(found)
    return differences


def shards(gang: Any) -> dict[str, list[int]]:
    """Numbers of the tiny backbone's weights that a worker holds at ZeRO stage 3: [of its shards, gathered ones]."""
    from latent_sweep.backbones import BackboneSettings
    from latent_sweep.config import EngineSettings
    from latent_sweep.engine import engine_of

    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    engine = engine_of(EngineSettings(name="deepspeed", zero_stage=3, gather="always", config=config), gang)
    model = engine.load(BackboneSettings(name="tiny-llama", dtype="float32", device="cpu")).model

    def held() -> list[int]:
        return [sum(p.ds_tensor.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters())]

    found = {"whole": [0, sum(p.ds_numel for p in model.parameters())], "loaded": held()}
    engine.begin_answering()
    found["answering"] = held()
    engine.begin_learning()
    return found | {"learning": held()}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
