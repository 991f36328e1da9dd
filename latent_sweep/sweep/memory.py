"""Predict the memory that a worker needs to train and to evaluate, from the settings alone, without torch or a model.

Legend: b bytes per number in the backbone's type; B examples per forward pass, of all runs of a pack; S longest prompt,
L longest target, T = B S tokens (Llama: B (S + L)); h width, a all heads together, H heads, f inner width of the MLP,
r rank, V vocabulary, P trainable parameters, M adapted projections of o x n.

    weights      b per parameter, counted exactly; at ZeRO stage 3 a worker holds its share of the large ones
    factors      latent adapters: b r (o + n) for each projection
    adapter      8 P: values and gradients in float32
    optimizer    8 P: AdamW's two moments
    history      (4 + b) P for each task, if earlier task adapters stay active or answer together
    merged       b o n for each projection, if adapters answer merged into dense matrices, and 32 o n to merge one
    moments      InfLoRA and GainLoRA, before and after a task: 8 n^2 for each input that projections read, and
                 64 n^2 to find the directions of one, or 16 n for each token of a batch
    fisher       EWC, after a task: a pass of as many examples as a step's, at most 8, and 8 P for each: its own
                 adapter and gradient
    logits       b V B L, and 12 V B L inside the cross-entropy: log-probabilities, and two gradients
    held         what a method keeps for its penalty, subspaces, sums of earlier updates, a block of a product, or for
                 its gradient: those of reference batches
    graphs       with `run.graphs: auto`, keys and values of all padded rows and places, and latent adapters once more
    activations  what autograd keeps of every block, and one block's working set in the backward pass

A Llama block keeps, in bytes per token: 4 (h + 1) for each of two norms, or b h + 4 on a GPU, where they are fused,
b (2 a + 2 k) for queries and output of the attention and its k wide keys and values, 4 H for its normaliser, 3 b f in
the MLP. A frozen projection keeps nothing; an adapter keeps b r per projection, and LoRA its input, b h. A T5 block
differs in its norms, (4 + b) h in bfloat16 if they are not fused, its MLP, b f, or 6 b f where a GELU gates it, and in
its decoder, where every block keeps keys and values of all prompt tokens; all blocks share a mask, b B H S^2 with the
position bias in it, or have one each. LoRA also keeps b P, its matrices in bfloat16; latent adapters b r o for each
projection, the product of its left factor and R, and in bfloat16 the left factors in float32. T5's own dropout keeps
noise: 2 h in an encoder's block and 3 h in a decoder's, and f, each a byte on a GPU and b on a CPU, where attention
with dropout is not fused and keeps 8 B H S^2. On a CPU attention is trained in float32, so that it keeps 4 instead of
b. The backward pass of an MLP adds as many numbers as it keeps (T5: twice as many). With gradient checkpointing only
each block's input is kept, b h, and one block at a time has all of the
above.

Prompts and targets are assumed to be at their limits. Not included: the device's context and the allocator's unused
memory (see `RESERVE`, and `Memory.overhead` for a CPU), allocations between steps or tasks (a gate, the SVD, loading),
and LwF's teacher. Blocks of other families differ only in their norms, each of which keeps 4 (k + 1) for the k numbers
that it reads, or b k + 4 if `FUSIBLE` lists it and a GPU computes; families without a table are not predicted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from latent_sweep.adapters.inputs import input_of
from latent_sweep.backbones.families import FUSIBLE, Family, Sizes, Stack, sizes, tensor_sizes
from latent_sweep.backbones.graph_sizes import padded_places, padded_rows
from latent_sweep.backbones.registry import EMBEDDED, BackboneSettings, describe
from latent_sweep.data.probe_tokens import CHUNK, MOST_LOGITS, PROMPT
from latent_sweep.sweep.packs import Pack
from latent_sweep.sweep.schema import ResourceSettings, RunSettings
from latent_sweep.sweep.trial import Trial

GIB = 1 << 30

RESERVE = 3 * GIB // 2
"""About the memory of a GPU's context, the libraries' workspaces and the allocator's unused blocks."""

HOST_RESERVE = 3 * GIB // 2
"""Minimum overhead of a process on a CPU: Python, the libraries, and unused C heap."""
LIBRARIES, HEAP_SHARE = GIB // 2, 0.45
"""Python with the libraries, and the share of a pass that the C heap keeps unused. Measured: SmolLM2 in float32 with 12
examples of 562 tokens needs 6.5 GiB as predicted, and 9.7 GiB resident."""

ACCELERATORS: Mapping[str, Mapping[int, float]] = {
    "T4": {16: 14.6},
    "V100": {16: 15.8, 32: 31.7},
    "A10G": {24: 22.1},
    "L4": {24: 22.0},
    "L40S": {48: 44.4},
    "A100": {40: 39.4, 80: 79.1},
    "A100-40G": {40: 39.4},
    "A100-80G": {80: 79.1},
    "H100": {80: 79.1},
    "H200": {141: 139.7},
    "B200": {192: 178.3},
}
"""Usable GiB by Ray's names of accelerators and the GB they are sold with; `A100` covers two cards."""


GENERATION_ROOM = 64
"""Tokens by which the key-value cache grows, up to the longest answer; as in `latent_sweep.backbones.generation`."""

GATHER_ROOM = 1.25
"""Weights are gathered to evaluate if this many times their size is free; as in `latent_sweep.execution.deepspeed`."""

ZERO_DEFAULTS: Mapping[str, int] = {
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}
"""DeepSpeed's defaults, in numbers; `run.engine.config` may override them."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker on its device at the peak of a training step or of an evaluation; see the legend above."""

    weights: int
    """Of the backbone, always resident."""
    gathered: int
    """Of the backbone, fetched from other workers or the host for the blocks that compute."""
    gathered_to_answer: int
    """The same, during evaluation."""
    host: int
    """Of the backbone, in host memory."""
    factors: int
    history: int
    merged: int
    """Of the dense matrices in which snapshots answer."""
    activations: int
    working: int
    """Of one block in the backward pass, with recomputed activations."""
    logits: int
    adapter: int
    optimizer: int
    held: int
    moments: int
    fisher: int
    cache: int
    reading: int
    """Activations during generation."""
    graphs: int
    """Of the fixed memory of decoding graphs."""

    @property
    def _resident(self) -> int:
        return self.weights + self.factors + self.history

    @property
    def learning(self) -> int:
        passed = self.activations + self.working + self.logits
        return self._resident + self.gathered + passed + self.adapter + self.optimizer + self.held

    @property
    def answering(self) -> int:
        return self._resident + self.merged + self.gathered_to_answer + self.cache + self.reading + self.graphs

    @property
    def measuring(self) -> int:
        """Peak of measuring second moments or Fisher information; 0 without either."""
        measured = max(self.moments, self.fisher)
        return self._resident + self.gathered + self.adapter // 2 + measured if measured else 0

    @property
    def overhead(self) -> int:
        """Of a process on a CPU; see `LIBRARIES`."""
        passed = max(self.activations + self.working + self.logits, self.fisher)
        return max(HOST_RESERVE, LIBRARIES + int(HEAP_SHARE * passed))

    @property
    def peak(self) -> int:
        """Without decoding graphs, which are dropped if they do not fit."""
        return max(self.learning, self.measuring, self.answering - self.graphs)


def predict(trial: Trial, run: RunSettings, runs: int = 1) -> Memory | None:
    """Predict the memory of a worker; None if no table describes the backbone, or only the hub knows its shapes.

    `gradient_checkpointing: auto` counts as off.

    Args:
        runs: of the pack, all like this trial.
    """
    s, method = trial.settings, trial.method()
    shape = shape_of(s.backbone)
    if shape is None:
        return None
    of_run = method.parameter_count(shape.targets, shape["width"])
    trained, tasks = runs * of_run, len(trial.tasks)
    learns = any(method.learns_from(position, tasks) for position in range(tasks))
    rows = s.training.rows_in_a_pass(run.resources.workers)
    kept = _adapters(trial, shape, trained, runs)
    activations, working, logits = _step(trial, shape, kept, run.resources, runs * rows) if learns else (0, 0, 0)
    weights, gathered, gathered_to_answer, host = _weights(shape, run)
    cache, reading = _answer(trial, shape)
    if run.probes:
        reading = max(reading, _probe(trial, shape) - cache)
    sides = sum(m + n for m, n in shape.targets.values())
    factors = shape.bytes * method.rank() * sides if method.factored else 0
    dense, largest = method.dense_entries(shape.targets), max((m * n for m, n in shape.targets.values()), default=0)
    return Memory(
        weights=weights,
        gathered=gathered,
        gathered_to_answer=gathered_to_answer,
        host=host,
        factors=runs * factors,
        history=tasks * trained * (4 + shape.bytes) if "sum" in method.combinations else 0,
        merged=shape.bytes * dense + 8 * 4 * largest if dense else 0,
        activations=activations,
        working=working,
        logits=logits,
        adapter=8 * trained,
        optimizer=8 * trained if s.training.optimizer == "adamw" else 0,  # Adafactor's are rows and columns
        held=runs * method.held_bytes(shape.targets, tasks) if learns else 0,
        moments=_second_moments(trial, shape),
        fisher=_fisher(trial, shape, of_run, run.resources, rows) if learns else 0,
        cache=cache,
        reading=reading,
        graphs=_fixed_cache(trial, shape) + factors if _decodes_with_graphs(run) else 0,
    )


def with_checkpointing(trial: Trial, on: bool) -> Trial:
    training = trial.settings.training.model_copy(update={"gradient_checkpointing": on})
    return replace(trial, settings=trial.settings.model_copy(update={"training": training}))


def decided(pack: Pack, run: RunSettings, free: Callable[[BackboneSettings], float]) -> Pack:
    """Return the pack with `training.gradient_checkpointing: auto` decided: on if training would not fit without.

    All runs of a pack share a pass and are taken to be like the largest; without a prediction it stays off.

    Args:
        free: returns the free bytes of the backbone's device; called only if there is something to decide.
    """
    trials = [trial for trial in pack.trials if trial.settings.training.gradient_checkpointing == "auto"]
    if not trials:
        return pack
    predictions = [predict(with_checkpointing(each.trials[0], False), run, len(pack.runs)) for each in pack.runs]
    room = free(trials[0].settings.backbone)
    on = any(memory is not None and memory.learning + RESERVE > room for memory in predictions)
    runs = [replace(each, trials=tuple(with_checkpointing(trial, on) for trial in each.trials)) for each in pack.runs]
    return replace(pack, runs=tuple(runs))


def cards(resources: ResourceSettings) -> dict[int, float]:
    """Return a worker's bytes on its accelerator by the card's GB; empty for an unknown accelerator."""
    by_size = ACCELERATORS.get(resources.accelerator or "", {}) if resources.gpus else {}
    return {size: resources.gpus * GIB * visible for size, visible in by_size.items()}


# --- shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Sizes of a backbone that memory depends on, by the names of `Sizes`."""

    family: Family
    bytes: int
    sizes: Sizes
    parameters: Mapping[int, int]
    """Number of weight tensors by size, in numbers."""
    targets: Mapping[str, tuple[int, int]]
    """Adapted projections, (out, in)."""
    fusible: bool
    """Whether a GPU computes its norms in one kernel."""

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    @property
    def parameter_count(self) -> int:
        return sum(size * count for size, count in self.parameters.items())

    @property
    def inputs(self) -> Mapping[str, int]:
        """Widths of the inputs of adapted projections; a block's query and value share one."""
        return {input_of(name): n for name, (_, n) in self.targets.items()}

    @property
    def attentions(self) -> int:
        """Number of attentions; a decoder block after an encoder has two."""
        return self["blocks"] + 2 * self["decoder_blocks"]

    @property
    def mlp_inputs(self) -> int:
        """Numbers of the inner width that an MLP computes with."""
        return (3 if self.sizes.gated else 2) * self["inner"]


def shape_of(settings: BackboneSettings) -> Shape | None:
    """Return the sizes of a backbone; None as in `predict`."""
    described = describe(settings)
    if described is None or not described.traits.stacks:
        return None
    family, of_config = described.traits, sizes(described.traits, described.config)
    return Shape(
        family=family,
        bytes={"bfloat16": 2, "float32": 4}[settings.dtype],
        sizes=of_config,
        parameters=tensor_sizes(family, described.config, of_config.tied or settings.name == EMBEDDED),
        targets=described.adapted(settings),
        fusible=described.family in FUSIBLE,
    )


def _weights(shape: Shape, run: RunSettings) -> tuple[int, int, int, int]:
    """Return `Memory`'s weights, gathered, gathered_to_answer and host: whole, or sharded at ZeRO stage 3.

    A sharded weight stays gathered if it is used again within DeepSpeed's reuse distance, which at the turn from the
    forward to the backward pass covers half of it; the next weights are prefetched.
    """
    b, engine, workers = shape.bytes, run.engine, run.resources.workers
    whole, offloaded = b * shape.parameter_count, engine.offload == "cpu"
    if engine.name == "torch" or engine.zero_stage < 3 or (workers == 1 and not offloaded):
        return whole, 0, 0, 0
    config = engine.config.get("zero_optimization", {})
    persistent, reuse, prefetch = (int(config.get(name, default)) for name, default in ZERO_DEFAULTS.items())
    small = b * sum(size * count for size, count in shape.parameters.items() if size <= persistent)
    large = whole - small
    gathered = min(large, b * (max(reuse // 2, *shape.parameters) + prefetch))
    share = _share(large, workers)
    held, host = (small, share) if offloaded else (small + share, 0)
    room = max(cards(run.resources).values(), default=math.inf)
    fits = engine.gather == "always" or (engine.gather == "auto" and held + GATHER_ROOM * large + RESERVE <= room)
    return held, gathered, large if fits else gathered, host


def _share(total: int, workers: int) -> int:
    return -(-total // workers)


# --- a step ----------------------------------------------------------------------------------------------------------


class _Adapters(NamedTuple):
    """Bytes that autograd keeps for adapters."""

    inputs: int = 0
    """Of the inputs of an attention block, per token."""
    inner: int = 0
    """Of the products inside all adapters of a block, per token."""
    one: int = 0
    """Of the product inside one adapter, per token."""
    products: int = 0
    """Of products of the matrices, independent of the batch."""


def _adapters(trial: Trial, shape: Shape, trained: int, runs: int) -> _Adapters:
    method, b = trial.method(), shape.bytes
    if not trained or not method.rank():  # nothing to learn, or a soft prompt
        return _Adapters()
    read = 0 if method.factored else b
    if not method.packable:  # with dropout both projections have their own input, and a mask
        read = 2 * (read + 1)
    if method.factored:
        out = method.rank() * sum(m for m, _ in shape.targets.values())
        products = runs * (b + (4 if b < 4 else 0)) * out
    else:
        products = b * trained if b < 4 else 0
    one = b * method.kept_rank(len(trial.tasks))
    inputs = _share(read * sum(shape.inputs.values()), shape.attentions)
    return _Adapters(inputs, _share(one * len(shape.targets), shape.attentions), one, products)


class _Stack(NamedTuple):
    """A sequence of equal blocks, in bytes of one."""

    blocks: int
    kept: int
    working: int
    """In addition, in the backward pass."""
    input: int
    """What gradient checkpointing keeps instead."""
    norm: int
    shared: int
    """The mask of all blocks together."""


def _stack(
    shape: Shape, fused: bool, blocks: int, tokens: int, per_token: int, per_batch: int = 0, shared: int = 0
) -> _Stack:
    """Return a stack whose blocks keep these bytes, without the MLP."""
    b, h = shape.bytes, shape["width"]
    mlp = b * shape["inner"] * shape.sizes.kept
    in_norm = 0 if fused else 4 * 4 * h - mlp  # in float32, after the MLP's activations are freed
    return _Stack(
        blocks=blocks,
        kept=tokens * (per_token + mlp) + per_batch,
        working=tokens * (max(b * shape.mlp_inputs, in_norm) + 2 * b * h),
        input=tokens * b * h,
        norm=tokens * _norm(shape, fused),
        shared=shared,
    )


def _stacks(
    shape: Shape, adapters: _Adapters, rows: int, prompt: int, target: int, noise: int, on_cpu: bool
) -> list[_Stack]:
    """Return the stacks in the order of the forward pass.

    Args:
        noise: bytes of one number of the backbone's dropout noise; 0 without dropout.
        on_cpu: attention is computed in float32, and keeps its probabilities with dropout.
    """
    fused = shape.fusible and not on_cpu
    a, heads, norm, width = shape["queries"], shape["heads"], _norm(shape, fused), shape["width"]
    of_attention = 4 if on_cpu else shape.bytes
    attention = of_attention * 2 * (a + shape["keys"]) + 4 * heads + adapters.inputs + adapters.inner
    if not shape.family.encoder_decoder:
        (stack,) = shape.family.stacks
        kept = _norms(shape, stack, fused) + attention
        return [_stack(shape, fused, shape["blocks"], rows * (prompt + target), kept)]
    read, mask = rows * prompt, of_attention * rows * heads
    mask_of_encoder, mask_across = mask * prompt**2, mask * prompt * target
    of_mlp, drawn = noise * shape["inner"], 2 * 4 * rows * heads if noise and on_cpu else 0
    of_encoder = drawn * prompt**2
    across = read * (2 * of_attention * a + adapters.one) + drawn * target * (prompt + target)
    if not shape.family.shared_bias:  # every block keeps its own mask
        of_encoder, across = of_encoder + mask_of_encoder, across + mask_across + mask * target**2
        mask_of_encoder = mask_across = 0
    encoder = 2 * norm + attention + 2 * noise * width + of_mlp
    decoder = 3 * norm + 2 * attention + 3 * noise * width + of_mlp
    return [
        _stack(shape, fused, shape["blocks"], read, encoder, of_encoder, mask_of_encoder),
        _stack(shape, fused, shape["decoder_blocks"], rows * target, decoder, across, mask_across),
    ]


def _norm(shape: Shape, fused: bool, wide: str = "width", roots: int = 1) -> int:
    """Bytes per token of a norm: its input, fused in its own type, else in float32, and its inverse roots.

    T5's also keeps the input in its type, if it is not fused.
    """
    also = shape.bytes if shape.family.keeps_input and shape.bytes < 4 else 0
    return (shape.bytes if fused else 4 + also) * shape[wide] + 4 * roots


def _norms(shape: Shape, stack: Stack, fused: bool) -> int:
    """Bytes per token of all norms of a causal block; norms per head keep an inverse root for each head."""
    of_heads = {"query_heads": ("queries", "heads"), "key_heads": ("keys", "kv_heads")}
    pairs = (of_heads.get(norm, (norm, "")) for norm in stack.norms)
    return sum(_norm(shape, fused, wide, shape[roots] if roots else 1) for wide, roots in pairs)


def _step(
    trial: Trial, shape: Shape, adapters: _Adapters, resources: ResourceSettings, rows: int
) -> tuple[int, int, int]:
    """Return `Memory`'s activations, working and logits at the peak of a step.

    That is in the cross-entropy, or in the backward pass of a stack's last block.
    """
    training = trial.settings.training
    prompt, target = _longest(trial)
    on_cpu = not resources.gpus
    noise = (shape.bytes if on_cpu else 1) if training.backbone_dropout else 0
    stacks = _stacks(shape, adapters, rows, prompt, target, noise, on_cpu)
    logits = shape.bytes * shape["vocabulary"] * rows * target
    in_loss = logits + 12 * shape["vocabulary"] * rows * target
    masks = adapters.products + sum(stack.shared for stack in stacks)
    if training.gradient_checkpointing is True:
        inputs = masks + sum(stack.blocks * stack.input for stack in stacks)
        fullest = max(stack.kept + stack.working for stack in stacks)
        return max((inputs + sum(s.norm for s in stacks), 0, in_loss), (inputs, fullest, logits), key=sum)
    # the first norm of a stack keeps nothing, as nothing below it is trained; the norm after the stack makes up for it
    kept = list(itertools.accumulate(stack.blocks * stack.kept for stack in stacks))
    # later stacks have finished their backward pass
    backward = [(below + masks, stack.working, logits) for below, stack in zip(kept, stacks, strict=True)]
    return max((kept[-1] + masks, 0, in_loss), *backward, key=sum)


def _probe(trial: Trial, shape: Shape) -> int:
    """Return bytes of a pass over chunks of a text, with the logits of their targets."""
    targets = CHUNK - PROMPT
    rows = max(1, min(trial.settings.evaluation.batch_size, MOST_LOGITS // (shape["vocabulary"] * targets)))
    in_block = rows * CHUNK * shape.bytes * max(shape.mlp_inputs + 4 * shape["width"], 8 * shape["queries"])
    of_row = shape["vocabulary"] * targets
    return max(in_block, rows * of_row * shape.bytes + 3 * 4 * of_row)


def _longest(trial: Trial) -> tuple[int, int]:
    """Return the tokens of the longest prompt, with a soft prompt, and of the longest target."""
    limits = trial.settings.benchmark
    virtual = trial.method().virtual_tokens(len(trial.tasks))
    return limits.max_source_length + virtual, limits.max_target_length


def _fisher(trial: Trial, shape: Shape, trained: int, resources: ResourceSettings, rows: int) -> int:
    """Return bytes of the pass that measures gradients of single examples, each with its own adapter."""
    rows = min(trial.method().gradient_rows, rows)
    if not rows:
        return 0
    adapters = _adapters(trial, shape, rows * trained, 1)
    return sum(_step(trial, shape, adapters, resources, rows)) + 8 * rows * trained


def _second_moments(trial: Trial, shape: Shape) -> int:
    """Return bytes of the second moments of inputs, with a batch that is read or an eigenproblem.

    A batch has two float64 copies of an input, one times its counts, in addition to the pass itself. The number of
    n x n matrices of the eigenproblem was counted on small models.
    """
    gpm = getattr(trial.settings.method, "gpm", None)
    if gpm is None:
        return 0
    prompt, target = _longest(trial)
    tokens = gpm.batch_size * (prompt if shape.family.encoder_decoder else prompt + target)
    widths = [n // gpm.chunks for n in shape.inputs.values()]
    if shape.family.encoder_decoder and gpm.cross_attention_v == "own_input":
        widths.append(shape["width"] // gpm.chunks)  # the encoder's output, read by all blocks
    width, moments = max(widths), 8 * gpm.chunks * sum(width**2 for width in widths)
    reading = tokens * (2 * 8 * width + shape.bytes * (2 * shape["queries"] + 2 * shape["width"]))
    return moments + max(reading, 8 * 8 * width**2)


def _answer(trial: Trial, shape: Shape) -> tuple[int, int]:
    """Return `Memory`'s cache and reading at the peak: reading prompts, or at the end of the longest answers."""
    rows, (prompt, target) = trial.settings.evaluation.batch_size, _longest(trial)
    b, a, h, heads, tokens = shape.bytes, shape["queries"], shape["width"], shape["heads"], rows * prompt
    in_mlp = tokens * b * (shape.mlp_inputs + 4 * h)
    later = target - 1  # nothing reads the last token
    if not shape.family.encoder_decoder:
        of_token = 2 * b * shape["keys"] * rows  # keys and values of one block
        first, whole = shape["blocks"] * of_token * (prompt + min(later, GENERATION_ROOM)), of_token * (prompt + later)
        at_first = first, max(in_mlp, tokens * b * (8 * a + 3 * h)) + b * rows * prompt**2
        at_last = shape["blocks"] * whole, whole  # with a copy of one block's
    else:
        of_token = 2 * b * a * rows
        in_attention = tokens * b * (3 * a + 3 * h) + 2 * b * rows * heads * prompt**2
        at_first = 0, max(in_mlp, in_attention) + b * heads * prompt**2
        cache = shape["decoder_blocks"] * of_token * (prompt + target)
        at_last = cache, tokens * b * h + of_token * max(prompt, target)  # the encoder's output, and the copy
    return max(at_first, at_last, key=sum)


def _decodes_with_graphs(run: RunSettings) -> bool:
    resources = run.resources
    return run.graphs == "auto" and run.engine.name == "torch" and resources.workers == 1 and resources.gpus > 0


def _fixed_cache(trial: Trial, shape: Shape) -> int:
    """Return bytes of the keys and values of a graph for the largest batch; see `backbones.token_graphs`."""
    rows, (prompt, target) = padded_rows(trial.settings.evaluation.batch_size), _longest(trial)
    if not shape.family.laid_out:
        return 0
    if not shape.family.encoder_decoder:
        return shape["blocks"] * 2 * shape.bytes * shape["keys"] * rows * padded_places(prompt + target)
    places = padded_places(1 + target) + padded_places(prompt)
    return shape["decoder_blocks"] * 2 * shape.bytes * shape["queries"] * rows * places
