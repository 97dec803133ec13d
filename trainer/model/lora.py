"""LoRA: small matrices beside frozen projections, saved as PEFT saves them.

    y = W x + (alpha / r) B A x        A [r, in] drawn uniformly, B [out, r] zero, so that training starts at the base

Three decoders share one storage of the frozen weights:

    base     no adapters: the reference of the KL leash
    policy   the base's parameters and the adapters; what is trained
    decoder  for the rollout: the base's parameters, but adapted projections are copies into which W + (alpha / r) B A
             is merged in place before every rollout: decoding costs what it costs without LoRA, graphs stay valid

Files are PEFT's: adapter_config.json and adapter_model.safetensors. Letters: r rank, I and O width in and out of a
projection, T packed tokens. Source: Hu et al., LoRA (arXiv:2106.09685).
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sparkgrpo.kernels.linear import linear
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.contradictions import LORA_TARGETS, lora_targets
from sparkgrpo.trainer.model.decoder import Adapters, Decoder, DecoderConfig, Projection
from sparkgrpo.trainer.model.stored import read_json
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, state_dict_hf

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_PARTS: Mapping[Projection, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The projections that a fused weight holds, in the order of its rows."""


class LoraPair(nn.Module):
    """The two matrices of one projection."""

    def __init__(self, a_RI: torch.Tensor, b_OR: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a_RI, self.b_OR, self.scale = nn.Parameter(a_RI), nn.Parameter(b_OR), scale

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """(alpha / r) B A x, [T, O]."""
        return linear(linear(x_TI, self.a_RI, None), self.b_OR, None) * self.scale

    def product_OI(self) -> torch.Tensor:
        """(alpha / r) B A in float32."""
        return (self.b_OR.float() @ self.a_RI.float()) * self.scale


class LoraAdapters(Adapters):
    """The pairs of one block, by the name of their projection."""

    def __init__(self, pairs: Mapping[str, LoraPair], rows: Mapping[str, int]) -> None:
        super().__init__()
        self.pairs = nn.ModuleDict(dict(pairs))
        self.rows = dict(rows)

    def delta(self, name: Projection, x_TI: torch.Tensor) -> torch.Tensor | None:
        """What the pairs of a fused projection add, zeros where a part of it has none."""
        parts = _PARTS[name]
        if not any(part in self.pairs for part in parts):
            return None
        pieces = [
            self.pairs[part](x_TI) if part in self.pairs else x_TI.new_zeros(len(x_TI), self.rows[part])
            for part in parts
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """A base under training with adapters."""

    base: Decoder
    policy: Decoder
    decoder: Decoder
    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_name: str
    """What PEFT loads the base by."""

    @torch.no_grad()
    def merge(self) -> None:
        """Write W + (alpha / r) B A into the decoder's projections, in place; the sum is made in float32."""
        base, merged = state_dict_hf(self.base), state_dict_hf(self.decoder)
        for module, pair in self.pairs().items():
            name = f"{module}.weight"
            merged[name].copy_(base[name].float() + pair.product_OI())

    def pairs(self) -> dict[str, LoraPair]:
        """Every pair by the Hugging Face name of its projection, "model.layers.0.self_attn.q_proj"."""
        found: dict[str, LoraPair] = {}
        for layer_idx, layer in enumerate(self.policy.layers):
            assert isinstance(layer.adapters, LoraAdapters)
            for target, pair in layer.adapters.pairs.items():
                assert isinstance(pair, LoraPair)
                found[_module_name(layer_idx, target)] = pair
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapters under PEFT's names."""
        named: dict[str, torch.Tensor] = {}
        for module, pair in self.pairs().items():
            named[f"{_PEFT_PREFIX}{module}.lora_A.weight"] = pair.a_RI.detach()
            named[f"{_PEFT_PREFIX}{module}.lora_B.weight"] = pair.b_OR.detach()
        return named

    def save(self, folder: Path) -> None:
        """Write the two files that `peft.PeftModel.from_pretrained` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        from peft import LoraConfig, TaskType

        LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # pyright: ignore[reportArgumentType]  PEFT divides it by the rank, whatever it is
            target_modules=list(self.targets),
            lora_dropout=0.0,
            bias="none",
            task_type=TaskType.CAUSAL_LM,
            base_model_name_or_path=self.base_name,
            inference_mode=True,
        ).save_pretrained(str(folder))
        save_file(self.tensors(), folder / WEIGHTS_FILE, metadata={"format": "pt"})

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Fill the adapters in place with those in a folder. `UserError` where they are others' or damaged."""
        stored, own = _read_weights(folder), self.tensors()
        if stored.keys() != own.keys() or any(stored[name].shape != own[name].shape for name in own):
            raise UserError(
                f"{folder}: expected adapters of rank {self.rank} on {', '.join(self.targets)}, got others; "
                "they belong to another run"
            )
        for name, tensor in own.items():
            tensor.copy_(stored[name])


def add_lora(loaded: LoadedModel, config: Config) -> Lora:
    """Freeze a model and put adapters beside its projections, their draws keyed by the run's seed.

    Raises:
        UserError: The package peft is missing, or the model is itself a folder of adapters.
    """
    _check_peft()
    if is_adapter_folder(loaded.source):
        raise UserError(
            f"{loaded.source}: expected a model to put adapters on, got adapters: merge them into their base first "
            "(peft's merge_and_unload), save, and name that folder"
        )
    targets = lora_targets(config.lora_targets)
    base = loaded.model.requires_grad_(False)
    generator = torch.Generator().manual_seed(config.seed)
    policy = _sharing(base, copied=())
    for layer in policy.layers:
        pairs = {}
        for target in targets:
            rows, columns = _shape(base.config, target)
            bound = 1 / math.sqrt(columns)  # as torch's Linear starts, and as PEFT draws A
            a_RI = (torch.rand(config.lora_rank, columns, generator=generator) * 2 - 1) * bound
            pairs[target] = LoraPair(
                a_RI.to(base.device, base.dtype),
                torch.zeros(rows, config.lora_rank, dtype=base.dtype, device=base.device),
                config.lora_alpha / config.lora_rank,
            )
        layer.adapters = LoraAdapters(pairs, {name: _shape(base.config, name)[0] for name in LORA_TARGETS})
    adapted = [f"{name}_weight" for name, parts in _PARTS.items() if {*parts} & {*targets}]
    return Lora(
        base=base,
        policy=policy,
        decoder=_sharing(base, copied=adapted),
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        targets=targets,
        base_name=str(Path(loaded.source).resolve()) if Path(loaded.source).is_dir() else loaded.source,
    )


def load_merged(folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    """The base that adapters in PEFT's format name, with the adapters merged into its weights.

    Raises:
        UserError: A damaged or foreign adapter_config.json, adapters that do not fit, a base that is not there.
    """
    facts = read_json(folder / CONFIG_FILE)
    rank, alpha = facts.get("r"), facts.get("lora_alpha")
    base_name, kind = facts.get("base_model_name_or_path"), facts.get("peft_type")
    plain = kind == "LORA" and not any(
        facts.get(key) for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
    )
    if not (plain and isinstance(rank, int) and isinstance(alpha, (int, float)) and isinstance(base_name, str)):
        raise UserError(
            f"{folder}: expected plain LoRA adapters (one rank, no DoRA, no further modules) with the name of their "
            "base, got others: merge them with peft's merge_and_unload, save, and name that folder"
        )
    loaded = load_model(base_name, dtype=dtype, device=device)
    views, stored = state_dict_hf(loaded.model), _read_weights(folder)
    ends = (".lora_A.weight", ".lora_B.weight")
    modules = {name.removeprefix(_PEFT_PREFIX).removesuffix(end) for name in stored for end in ends}
    modules = {module for module in modules if not module.endswith(".weight")}
    for module in sorted(modules):
        a_RI, b_OR = (stored.get(f"{_PEFT_PREFIX}{module}{end}") for end in ends)
        view = views.get(f"{module}.weight")
        if a_RI is None or b_OR is None or view is None or view.shape != (len(b_OR), a_RI.shape[1]):
            raise UserError(f"{folder}: the adapter of {module} does not fit {base_name}: they belong to another base")
        product_OI = (b_OR.float() @ a_RI.float()) * (alpha / rank)
        view.copy_(view.float().cpu() + product_OI)
    return replace(loaded, source=str(folder))


def is_adapter_folder(source: str) -> bool:
    """Whether a model's name is a folder of adapters, and of nothing that could be loaded alone."""
    return (Path(source).expanduser() / CONFIG_FILE).is_file()


def _sharing(model: Decoder, *, copied: Sequence[str]) -> Decoder:
    """Another decoder on the same parameters, but with copies of those of every block that are named."""
    own = {id(getattr(layer, name)) for layer in model.layers for name in copied}
    shared = {id(p): p for p in model.parameters() if id(p) not in own}
    return copy.deepcopy(model, shared)  # pyright: ignore[reportArgumentType]  what is in the memo is not copied


def _shape(config: DecoderConfig, target: str) -> tuple[int, int]:
    """Rows and columns of a projection's weight."""
    H, K, E, D = (config.num_heads, config.num_kv_heads, config.head_width, config.width)
    return {
        "q_proj": (H * E, D),
        "k_proj": (K * E, D),
        "v_proj": (K * E, D),
        "o_proj": (D, H * E),
        "gate_proj": (config.ffn_width, D),
        "up_proj": (config.ffn_width, D),
        "down_proj": (D, config.ffn_width),
    }[target]


def _module_name(layer_idx: int, target: str) -> str:
    block = "self_attn" if target in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"model.layers.{layer_idx}.{block}.{target}"


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(folder / WEIGHTS_FILE)
    except Exception as error:  # safetensors raises kinds of its own for missing and damaged files
        raise UserError(f"{folder / WEIGHTS_FILE}: expected LoRA adapters, cannot read them ({error})") from error


def _check_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError:
        raise UserError(
            'lora_rank: expected the package peft, which is not installed: pip install "sparkgrpo[lora]", or train all '
            "weights (--lora-rank 0)"
        ) from None
