"""The benchmark's baseline: the same sweep with peft, the transformers Trainer and Ray Tune, one trial per point.

    python -m bench.baseline CONFIG.json RESULT.json

Each trial loads the model once, trains a LoRA adapter per task in the `Trainer`, and after each task answers the test
rows of all tasks seen with batched `generate`. It resembles Latent-LoRA as far as the parts allow: lambda weighs
O-LoRA's overlap of down-projections, and a row is answered by the adapter of the nearest of K centroids per task, from
K-means on mean token embeddings. Rows are tokenized beforehand and answers are scored by our functions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

from latent_sweep.metrics.answers import cut_answer, score_rows

Example = Mapping[str, Any]
"""`prompt_ids` and `target_ids`; a test row has `references`, the accepted texts."""


@dataclass(frozen=True)
class Task:
    name: str
    metric: Any
    train: Sequence[Example]
    test: Sequence[Example]


@dataclass(frozen=True)
class Config:
    """Settings common to all trials of the sweep, and its three axes."""

    model: str
    encoder_decoder: bool
    projections: Sequence[str]
    dtype: str
    device: str
    tasks: Sequence[Task]
    steps: int
    batch_size: int
    eval_batch_size: int
    max_new_tokens: int
    stop: Sequence[str]
    ortho_lambda: Sequence[float]
    components: Sequence[int]
    seed: Sequence[int]
    concurrent: int
    """Trials at a time, one thread each; they share a GPU."""
    rank: int = 8
    alpha: int = 16
    learning_rate: float = 4e-3
    """The best AP of 2e-3, 4e-3 and 8e-3."""

    @classmethod
    def read(cls, path: Path) -> Config:
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(**content | {"tasks": [Task(**task) for task in content["tasks"]]})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


# --- training --------------------------------------------------------------------------------------------------------


def load(config: Config) -> tuple[Any, Any]:
    architecture = AutoModelForSeq2SeqLM if config.encoder_decoder else AutoModelForCausalLM
    model = architecture.from_pretrained(config.model, dtype=getattr(torch, config.dtype)).to(config.device)
    return model, with_padding(AutoTokenizer.from_pretrained(config.model))


def with_padding(tokenizer: Any) -> Any:
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # Llama has none
    return tokenizer


def lora_config(config: Config) -> LoraConfig:
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=list(config.projections),
        task_type="SEQ_2_SEQ_LM" if config.encoder_decoder else "CAUSAL_LM",
    )


def features(row: Example, encoder_decoder: bool) -> dict[str, list[int]]:
    prompt, target = list(row["prompt_ids"]), list(row["target_ids"])
    ids, labels = (prompt, target) if encoder_decoder else (prompt + target, [-100] * len(prompt) + target)
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


class OrthoTrainer(Trainer):
    """A Trainer with O-LoRA's penalty, lambda * sum over projections and earlier adapters of ||A_i A_t^T||_F^2."""

    def __init__(self, ortho_lambda: float, earlier: Sequence[str], current: str, **arguments: Any):
        super().__init__(**arguments)
        self.ortho_lambda, self.earlier, self.current = ortho_lambda, earlier, current

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not self.ortho_lambda or not self.earlier:
            return loss
        downs = [module.lora_A for module in model.modules() if hasattr(module, "lora_A")]
        pairs = [(down[name].weight, down[self.current].weight) for down in downs for name in self.earlier]
        return loss + self.ortho_lambda * torch.stack([(old @ new.T).square().sum() for old, new in pairs]).sum()


def trainer_arguments(
    config: Config, model: Any, tokenizer: Any, rows: Sequence[Example], seed: int, folder: str
) -> dict[str, Any]:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        train_sampling_strategy="group_by_length",
        seed=seed,
        use_cpu=config.device == "cpu",
        dataloader_pin_memory=config.device != "cpu",
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    if config.device != "cpu":
        _ = arguments.device  # counts the GPUs: with several the Trainer would spread each batch over all
        arguments._n_gpu = 1
    return {
        "model": model,
        "args": arguments,
        "train_dataset": [features(row, config.encoder_decoder) for row in rows],
        "data_collator": DataCollatorForSeq2Seq(tokenizer),
    }


# --- answering -------------------------------------------------------------------------------------------------------


def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Sequence[str],
    batch_size: int,
) -> list[list[int]]:
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    answers: list[list[int]] = [[] for _ in prompts]
    stops = {"stop_strings": list(stop), "tokenizer": tokenizer} if stop else {}
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        ids = {"input_ids": [list(prompts[row]) for row in rows]}
        inputs = tokenizer.pad(ids, padding_side="left", return_tensors="pt").to(model.device)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **stops)
        skipped = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        for row, answer in zip(rows, output[:, skipped:].tolist(), strict=True):
            answers[row] = answer
    return answers


def answer_texts(tokenizer: Any, answers: Sequence[Sequence[int]], stop: Sequence[str]) -> list[str]:
    return [cut_answer(text, stop) for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


def mean_embeddings(table: Tensor, rows: Sequence[Example]) -> Any:
    means = [table[torch.tensor(row["prompt_ids"], device=table.device)].float().mean(0) for row in rows]
    return torch.stack(means).detach().cpu().numpy()


# --- one trial -------------------------------------------------------------------------------------------------------


class BaselineTrial:
    """One point of the sweep."""

    def __init__(self, config: Config, ortho_lambda: float, components: int, seed: int):
        self.config, self.ortho_lambda, self.components, self.seed = config, ortho_lambda, components, seed
        torch.manual_seed(seed)
        base, self.tokenizer = load(config)
        self.table = base.get_input_embeddings().weight
        self.model = get_peft_model(base, lora_config(config), adapter_name=config.tasks[0].name)
        self.centroids: list[Any] = []

    def run(self) -> float:
        scores: list[float] = []
        for position in range(len(self.config.tasks)):
            self.learn(position)
            scores = [self.score(seen) for seen in self.config.tasks[: position + 1]]
        return sum(scores) / len(scores)

    def learn(self, position: int) -> None:
        from sklearn.cluster import KMeans

        config, task = self.config, self.config.tasks[position]
        earlier = [seen.name for seen in config.tasks[:position]]
        if position:
            self.model.add_adapter(task.name, lora_config(config))
        self.model.set_adapter(task.name)
        with TemporaryDirectory() as folder:
            arguments = trainer_arguments(config, self.model, self.tokenizer, task.train, self.seed, folder)
            OrthoTrainer(self.ortho_lambda, earlier, task.name, **arguments).train()
        self.model.eval()
        kmeans = KMeans(self.components, n_init=1, random_state=self.seed)
        self.centroids.append(kmeans.fit(mean_embeddings(self.table, task.train)).cluster_centers_)

    def score(self, task: Task) -> float:
        config = self.config
        owners = self.route(task.test)
        predictions = [""] * len(task.test)
        for position in sorted(set(owners)):
            rows = [row for row, owner in enumerate(owners) if owner == position]
            self.model.set_adapter(config.tasks[position].name)
            prompts = [task.test[row]["prompt_ids"] for row in rows]
            answers = generate_answers(
                self.model, self.tokenizer, prompts, config.max_new_tokens, config.stop, config.eval_batch_size
            )
            for row, text in zip(rows, answer_texts(self.tokenizer, answers, config.stop), strict=True):
                predictions[row] = text
        references = [list(row["references"]) for row in task.test]
        return float(score_rows(task.metric, predictions, references, "single_first").mean())

    def route(self, rows: Sequence[Example]) -> list[int]:
        from sklearn.metrics import pairwise_distances_argmin

        if len(self.centroids) == 1:
            return [0] * len(rows)
        owners = [position for position, centroids in enumerate(self.centroids) for _ in centroids]
        stacked = [centroid for centroids in self.centroids for centroid in centroids]
        return [owners[nearest] for nearest in pairwise_distances_argmin(mean_embeddings(self.table, rows), stacked)]


# --- the sweep -------------------------------------------------------------------------------------------------------

AXES = ("ortho_lambda", "components", "seed")


def run_trial(point: Mapping[str, Any], config: Config) -> None:
    from ray import tune

    quiet()
    torch.set_num_threads(1)
    tune.report({"AP": BaselineTrial(config, point["ortho_lambda"], point["components"], point["seed"]).run()})


def run_sweep(config: Config) -> list[dict[str, Any]]:
    """Run every point of the grid as a Ray Tune trial; return each point with its AP."""
    import ray
    from ray import tune

    ray.init(address="local", num_cpus=config.concurrent, include_dashboard=False, logging_level="ERROR")
    gpus = {} if config.device == "cpu" else {"GPU": 1 / config.concurrent}
    with TemporaryDirectory() as folder:
        results = tune.Tuner(
            tune.with_resources(tune.with_parameters(run_trial, config=config), {"CPU": 1, **gpus}),
            param_space={axis: tune.grid_search(list(getattr(config, axis))) for axis in AXES},
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
    ray.shutdown()
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(results)} trials failed; the first one: {failed[0]}")
    return [{axis: result.config[axis] for axis in AXES} | {"AP": result.metrics["AP"]} for result in results]


def quiet() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run_sweep(Config.read(Path(sys.argv[1])))), encoding="utf-8")
