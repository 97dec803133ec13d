"""Hugging Face checkpoints in and out of the fused decoder. The Hugging Face names live here and nowhere else.

Q, K and V are one parameter, gate and up another; `state_dict_hf` shows them under their Hugging Face names as views,
so that loading copies straight into place, saving makes no second model, and neither builds a model of transformers.

Letters: V vocabulary, D width, H query heads, K key heads, E head width, F width of the feed-forward.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model.chat import has_chat_template
from sparkgrpo.trainer.model.decoder import Decoder, DecoderConfig, DecoderLayer
from sparkgrpo.trainer.model.families import ARCHITECTURE, check_family, decoder_config
from sparkgrpo.trainer.model.gguf_file import gguf_config, gguf_tensors, open_gguf
from sparkgrpo.trainer.model.stored import StoredTensor, read_json, safetensors_tensors

INIT_STD = 0.02
MAX_NAMES = 4
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
HUB_SKIPPED = ["*/*", "consolidated*"]  # the same weights again, in the publisher's own format
GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")  # its name in transformers 5, and before
PLAIN_TEXT = "1 2 + a"
"""A tokenizer that knows no part of it reads no prompt of any task."""
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model and all that a Hugging Face folder holds beside its weights."""

    model: Decoder
    tokenizer: PreTrainedTokenizerFast
    hf_config: PreTrainedConfig
    generation_config: GenerationConfig
    source: str
    """What the user named: folder, hub name or GGUF file."""
    notes: tuple[str, ...] = ()
    """What the user should be told about this checkpoint, one sentence each."""

    @property
    def num_valid(self) -> int:
        """Rows of the head that are tokens; those beyond are padding, masked in sampling and in training.

        Walks through the vocabulary, about 0.1 s for 150,000 tokens: ask once.
        """
        return num_tokens(self.tokenizer)


def num_tokens(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest token id: `len(tokenizer)`, except where a tokenizer leaves gaps between its ids."""
    return max(tokenizer.get_vocab().values()) + 1


def state_dict_hf(model: Decoder) -> dict[str, torch.Tensor]:
    """Every weight under its Hugging Face name, as a view on the fused storage: to write into it is to set the model.

    A tied head occurs once, as the embedding. The views carry no gradient.
    """
    views = {EMBEDDING: model.embed_VD, "model.norm.weight": model.final_norm_D}
    if model.lm_head_VD is not None:
        views[HEAD] = model.lm_head_VD
    for layer_idx, layer in enumerate(model.layers):
        named = _layer_views(layer, model.config)
        views |= {f"model.layers.{layer_idx}.{name}": view for name, view in named.items() if view is not None}
    return {name: view.detach() for name, view in views.items()}


def _layer_views(layer: DecoderLayer, config: DecoderConfig) -> dict[str, torch.Tensor | None]:
    views: dict[str, torch.Tensor | None] = {
        "input_layernorm.weight": layer.attn_norm_D,
        "post_attention_layernorm.weight": layer.mlp_norm_D,
        "self_attn.q_norm.weight": layer.q_norm_E,
        "self_attn.k_norm.weight": layer.k_norm_E,
        "self_attn.o_proj.weight": layer.o_weight,
        "self_attn.o_proj.bias": layer.o_bias,
        "mlp.down_proj.weight": layer.down_weight,
        "mlp.down_proj.bias": layer.down_bias,
    }
    H, K, E, ffn = config.num_heads, config.num_kv_heads, config.head_width, config.ffn_width
    for suffix, qkv, gate_up in (
        ("weight", layer.qkv_weight, layer.gate_up_weight),
        ("bias", layer.qkv_bias, layer.gate_up_bias),
    ):
        if qkv is not None:
            parts = qkv.split((H * E, K * E, K * E))
            views |= {f"self_attn.{part}_proj.{suffix}": view for part, view in zip("qkv", parts, strict=True)}
        if gate_up is not None:
            parts = gate_up.split((ffn, ffn))
            views |= {f"mlp.{part}_proj.{suffix}": view for part, view in zip(("gate", "up"), parts, strict=True)}
    return views


def random_model(
    config: DecoderConfig, *, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """An untrained decoder: weights normal(0, 0.02), norms 1, biases 0, as transformers initialises these families.

    Drawn in float32 on the CPU and then rounded, so that a seed means the same model for every dtype and device.
    """
    model = Decoder(config, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    for name, view in state_dict_hf(model).items():
        if name.endswith(".bias"):
            view.zero_()
        elif view.dim() == 1:
            view.fill_(1.0)
        else:
            view.copy_(torch.randn(view.shape, generator=generator) * INIT_STD)
    return model


def decoder_shape(source: str) -> DecoderConfig:
    """The shape of a model that `load_model` would load, without its weights. Raises like it.

    A model on the hub is fetched to the disk for it.
    """
    gguf = _gguf_path(source)
    if gguf is not None:
        return decoder_config(gguf_config(open_gguf(gguf)))
    path = Path(source).expanduser()
    folder = path if path.is_dir() else _download(source)
    check_family(read_json(folder / "config.json"))
    return decoder_config(_read_config(folder))


def _gguf_path(source: str) -> Path | None:
    """The file, where the name is that of one. `UserError` where it is not there: the hub has folders alone."""
    path = Path(source).expanduser()
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise UserError(f"expected a GGUF file, got {source}: no such file")
    return path


def load_model(source: str, *, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    """A model from a Hugging Face folder, the hub, or a GGUF file.

    Args:
        source: Folder with safetensors, owner/name on the hub (cached files serve; HF_HUB_OFFLINE is respected), or
            FILE.gguf.
        dtype: Floating dtype of the weights in memory, whatever it is on disk.
        device: Where they go.

    Raises:
        UserError: nothing there, a family that is not known, weights that do not fit the config, no tokenizer.
    """
    path = Path(source).expanduser()
    if _gguf_path(source) is not None:
        reader = open_gguf(path)
        hf_config = gguf_config(reader)
        config = decoder_config(hf_config)
        stored = gguf_tensors(reader, config)
        tokenizer = _read_tokenizer(path.parent, path.name)
        _check_reads_text(tokenizer, path)
        generation_config = _generation_config(hf_config)
    else:
        folder = path if path.is_dir() else _download(source)
        check_family(read_json(folder / "config.json"))
        hf_config = _read_config(folder)
        config = decoder_config(hf_config)
        stored = safetensors_tensors(folder)
        tokenizer = _read_tokenizer(folder, None)
        _check_reads_text(tokenizer, folder)
        generation_config = _read_generation_config(folder, hf_config)
    _check_vocabulary(tokenizer, config.vocab_size)
    model = Decoder(config, dtype=dtype, device=device)
    _fill(model, stored, source)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        hf_config=hf_config,
        generation_config=generation_config,
        source=source,
        notes=_notes(hf_config, generation_config, tokenizer),
    )


def save_model(folder: Path | str, loaded: LoadedModel) -> None:
    """Write a Hugging Face folder in the model's dtype: config, generation config, tokenizer, model.safetensors.

    What is written is what `load_model` reads, bit for bit; transformers loads it too. A tied head is written once.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hf_config = copy.deepcopy(loaded.hf_config)
    hf_config.dtype = loaded.model.dtype
    hf_config.architectures = [ARCHITECTURE[loaded.model.config.family]]
    hf_config.save_pretrained(folder)
    # Not save_pretrained: it refuses combinations of sampling options that published checkpoints have.
    loaded.generation_config.to_json_file(folder / "generation_config.json")
    loaded.tokenizer.save_pretrained(folder)
    save_file(state_dict_hf(loaded.model), folder / "model.safetensors", metadata={"format": "pt"})


def stop_ids(
    generation_config: GenerationConfig | None, hf_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[int, ...]:
    """Ids that end a completion, ascending: the union of all three sources, each an id, a list of ids or None.

    Chat models end a turn and a document with different ids and name one here, the other there (trl issue 7039).
    """
    ids: set[int] = set()
    for holder in (generation_config, hf_config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        ids |= set() if found is None else {found} if isinstance(found, int) else set(found)
    return tuple(sorted(ids))


def _notes(
    hf_config: PreTrainedConfig, generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[str, ...]:
    notes = []
    if not has_chat_template(tokenizer):
        notes.append("The tokenizer has no chat template: prompts are given as plain text.")
    if not stop_ids(generation_config, hf_config, tokenizer):
        notes.append("The model names no end-of-sequence token: completions end at max_new_tokens only.")
    dropouts = {
        name: value
        for name, value in sorted(hf_config.to_dict().items())
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, (int, float)) and value > 0
    }
    if dropouts:  # it would make the log-probs of a training pass others than those that were sampled from
        named = " and ".join(f"{name} of {value:g}" for name, value in dropouts.items())
        notes.append(f"The config's {named} is not applied: training runs without dropout.")
    return tuple(notes)


def _download(name: str) -> Path:
    """The local folder of a hub repository, fetched where it is not in the cache."""
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIPPED))
    except HFValidationError as error:
        raise UserError(
            f"expected a folder, a hub name (owner/name) or FILE.gguf, got {name!r}: no such folder"
        ) from error
    except OSError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"expected a folder, a hub name or FILE.gguf, got {name!r}: no such folder, and the hub does not give it "
            f"({reason}); check the name and the network, or name a folder"
        ) from error


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers' checks of a config raise many kinds; each is a fault of the file
        raise UserError(f"expected a config that transformers reads in {folder}, got: {error}") from error


def _read_generation_config(folder: Path, hf_config: PreTrainedConfig) -> GenerationConfig:
    if not (folder / "generation_config.json").is_file():
        return _generation_config(hf_config)
    try:
        return GenerationConfig.from_pretrained(folder)
    except (ValueError, TypeError, OSError) as error:
        raise UserError(
            f"expected a generation_config.json that transformers reads in {folder}, got: {error}"
        ) from error


def _generation_config(hf_config: PreTrainedConfig) -> GenerationConfig:
    """What a checkpoint without a generation config would have said in it."""
    return GenerationConfig(
        bos_token_id=hf_config.bos_token_id, eos_token_id=hf_config.eos_token_id, pad_token_id=hf_config.pad_token_id
    )


def _read_tokenizer(folder: Path, gguf_file: str | None) -> PreTrainedTokenizerFast:
    """The tokenizer beside the weights, or the one inside a GGUF file."""
    try:
        if gguf_file is not None:  # AutoTokenizer would parse the whole file once more, only to pick this class
            return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=gguf_file)
        if _is_generic_tokenizer(folder):
            return PreTrainedTokenizerFast.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for missing and damaged files
        raise UserError(
            f"expected a tokenizer that transformers reads in {gguf_file or folder}, got: {error}; "
            "copy the model's tokenizer.json and tokenizer_config.json there"
        ) from error


def _is_generic_tokenizer(folder: Path) -> bool:
    """Whether tokenizer.json says all. AutoTokenizer would replace it where a class is registered for the family.

    For Qwen2 it does (transformers 5.24): a tokenizer of one's own would split text otherwise and have one token more.
    """
    if not (folder / "tokenizer.json").is_file() or not (folder / "tokenizer_config.json").is_file():
        return False
    return read_json(folder / "tokenizer_config.json").get("tokenizer_class") in GENERIC_TOKENIZERS


def _check_reads_text(tokenizer: PreTrainedTokenizerFast, place: Path) -> None:
    """`UserError` for a tokenizer without words: transformers makes one where the file with the vocabulary is missing.

    Asked of the tokenizer, not of the folder: a vocabulary may come in tokenizer.json, in tokenizer.model, in
    vocab.json and merges.txt, or in a GGUF file.
    """
    ids = tokenizer(PLAIN_TEXT, add_special_tokens=False)["input_ids"]
    if any(token_id != tokenizer.unk_token_id for token_id in ids):
        return
    cure = "use the model's safetensors" if place.is_file() else "copy the model's tokenizer.json there"
    missing = "" if place.is_file() or (place / "tokenizer.json").is_file() else " (there is no tokenizer.json)"
    raise UserError(
        f"expected a tokenizer that reads plain text in {place}, got one of {len(tokenizer.get_vocab())} tokens "
        f"that knows nothing of {PLAIN_TEXT!r}{missing}; {cure}"
    )


def _check_vocabulary(tokenizer: PreTrainedTokenizerFast, num_rows: int) -> None:
    homeless = sorted(token for token, token_id in tokenizer.get_vocab().items() if token_id >= num_rows)
    if homeless:
        raise UserError(
            f"expected a head with a row for every token, got {num_rows} rows (vocab_size) and {len(homeless)} tokens "
            f"beyond them ({_shorten(homeless)}): use the tokenizer that belongs to the weights "
            "(for a GGUF file, to whose tokenizer transformers may add a token: use the model's safetensors)"
        )


def _fill(model: Decoder, stored: Mapping[str, StoredTensor], source: str) -> None:
    """Copy every stored tensor into its place, after checking that names and shapes are exactly those of the model."""
    views = state_dict_hf(model)
    is_second_head = model.config.tie_embeddings and HEAD in stored and EMBEDDING in stored
    if is_second_head and not torch.equal(stored[HEAD].read(), stored[EMBEDDING].read()):
        raise UserError(
            f"expected {HEAD} to equal {EMBEDDING} in {source}, as tie_word_embeddings says, got different values: "
            "set tie_word_embeddings to false in config.json"
        )
    ignored = {HEAD} if is_second_head else set()
    ignored |= {name for name in stored if name.endswith(".rotary_emb.inv_freq")}  # old Llama files; computed here
    faults = {
        "missing": [name for name in views if name not in stored],
        "not known": sorted(stored.keys() - views.keys() - ignored),
        "of another shape": [
            f"{name} {list(stored[name].shape)} for {list(view.shape)}"
            for name, view in views.items()
            if name in stored and stored[name].shape != view.shape
        ],
    }
    if any(faults.values()):
        found = "; ".join(f"{len(names)} {fault}: {_shorten(names)}" for fault, names in faults.items() if names)
        raise UserError(f"expected the tensors that config.json describes in {source}, got {found}")
    for name, view in views.items():
        view.copy_(stored[name].read())


def _shorten(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
