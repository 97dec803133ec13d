"""LoRA: what peft makes of our adapters, what the rollout sees, and what is never touched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.model import lora as lora_file
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.model.lora import Lora, add_lora, is_adapter_folder, load_merged
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, state_dict_hf
from sparkgrpo.trainer.optim import MasterAdamW

Make = Callable[..., Any]
peft = pytest.importorskip("peft", reason="the extra lora is not installed")


def adapted(
    folder: Path, dtype: torch.dtype = torch.float32, *, targets: str = "all-linear", is_moved: bool = True
) -> tuple[LoadedModel, Lora]:
    loaded = load_model(str(folder), dtype=dtype, device="cpu")
    lora = add_lora(loaded, Config(lora_rank=4, lora_alpha=6.0, lora_targets=targets, seed=5))
    if is_moved:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for pair in lora.pairs().values():
                pair.b_OR += 0.3 * torch.randn(pair.b_OR.shape, generator=generator)
    return loaded, lora


def logits(logits_of: Make, model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(model, tokens)


TOKENS = torch.tensor([3, 14, 15, 9, 2, 6, 5, 30, 31])


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj", "k_proj,up_proj,down_proj", "o_proj"])
def test_peft_loads_what_we_save_and_computes_the_same(
    tiny_folder: Path, tmp_path: Path, naive_logits: Make, targets: str
) -> None:
    _, lora = adapted(tiny_folder, targets=targets)
    lora.save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    plain = base(TOKENS[None]).logits[0].detach()
    theirs = peft.PeftModel.from_pretrained(base, tmp_path)
    expected = theirs(TOKENS[None]).logits[0].detach()
    assert (expected - plain).abs().max() > 1e-3, "else the adapters did nothing"
    torch.testing.assert_close(logits(naive_logits, lora.policy, TOKENS), expected, rtol=1e-4, atol=1e-5)
    config = peft.PeftConfig.from_pretrained(tmp_path)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 6.0, 0.0)
    assert set(config.target_modules) == set(lora.targets) and config.base_model_name_or_path == str(tiny_folder)


def test_merged_weights_compute_what_the_adapters_do(tiny_folder: Path, tmp_path: Path, naive_logits: Make) -> None:
    """In the rollout's decoder; in one that is loaded from the adapters' folder; and in peft's own merge."""
    _, lora = adapted(tiny_folder)
    lora.merge()
    lora.save(tmp_path)
    expected = logits(naive_logits, lora.policy, TOKENS)
    torch.testing.assert_close(logits(naive_logits, lora.decoder, TOKENS), expected, rtol=1e-4, atol=1e-5)
    assert is_adapter_folder(str(tmp_path)) and not is_adapter_folder(str(tiny_folder))
    again = load_merged(tmp_path, dtype=torch.float32, device="cpu")
    assert again.source == str(tmp_path)
    views, merged = state_dict_hf(again.model), state_dict_hf(lora.decoder)
    for name, view in views.items():
        torch.testing.assert_close(view, merged[name], rtol=0, atol=1e-6)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    for name, view in merged.items():
        torch.testing.assert_close(view, theirs[name], rtol=1e-5, atol=1e-6)


def test_merging_is_in_place_and_from_the_base_every_time(tiny_folder: Path) -> None:
    """No drift: ten merges are one. Addresses stay, so that captured graphs stay valid."""
    _, lora = adapted(tiny_folder)
    addresses = [p.data_ptr() for p in lora.decoder.parameters()]
    lora.merge()
    once = [p.clone() for p in lora.decoder.parameters()]
    for _ in range(9):
        lora.merge()
    assert all(a.equal(b) for a, b in zip(once, lora.decoder.parameters(), strict=True))
    assert [p.data_ptr() for p in lora.decoder.parameters()] == addresses
    with torch.no_grad():
        for pair in lora.pairs().values():
            pair.b_OR.zero_()
    lora.merge()
    assert all(a.equal(b) for a, b in zip(lora.base.parameters(), lora.decoder.parameters(), strict=True))


def test_what_is_shared_and_what_is_not(tiny_folder: Path) -> None:
    loaded, lora = adapted(tiny_folder, targets="q_proj")
    assert lora.base is loaded.model
    base = {name: p.data_ptr() for name, p in lora.base.named_parameters()}
    policy = {name: p.data_ptr() for name, p in lora.policy.named_parameters()}
    decoder = {name: p.data_ptr() for name, p in lora.decoder.named_parameters()}
    assert base.items() <= policy.items() and base.keys() == decoder.keys()
    own = {name for name in base if base[name] != decoder[name]}
    assert own == {f"layers.{i}.qkv_weight" for i in range(2)}, "only what is merged into is copied"
    trained = {name for name, p in lora.policy.named_parameters() if p.requires_grad}
    assert trained == policy.keys() - base.keys() and len(trained) == 4


def test_an_untrained_adapter_changes_no_bit(tiny_folder: Path, naive_logits: Make) -> None:
    _, lora = adapted(tiny_folder, is_moved=False)
    assert logits(naive_logits, lora.policy, TOKENS).equal(logits(naive_logits, lora.base, TOKENS))
    pairs = lora.pairs()
    assert len(pairs) == 14 and all(pair.a_RI.abs().max() > 0 for pair in pairs.values())
    other = adapted(tiny_folder, is_moved=False)[1].pairs()
    assert all(pair.a_RI.equal(other[name].a_RI) for name, pair in pairs.items()), "drawn by the seed"
    assert not pairs["model.layers.0.self_attn.q_proj"].a_RI.equal(pairs["model.layers.1.self_attn.q_proj"].a_RI)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_moves_adapters_alone(
    tiny_folder: Path, make_batch: Make, preset: Make, run_update: Make, dtype: torch.dtype
) -> None:
    loaded, lora = adapted(tiny_folder, dtype, is_moved=False)
    before = {name: p.clone() for name, p in loaded.model.named_parameters()}
    optim = MasterAdamW(lora.policy, Config(lr=1e-2))
    assert optim.has_masters == (dtype == torch.bfloat16) and all("adapters" in name for name in optim.params)
    loss = sum((pair(torch.ones(3, pair.a_RI.shape[1], dtype=dtype)) * 1e2).sum() for pair in lora.pairs().values())
    loss.backward()
    stats = optim.step(1e-2)
    assert 0 < stats.frac_params_changed <= 1 and not stats.is_skipped
    assert all(p.equal(before[name]) for name, p in loaded.model.named_parameters())
    assert all(pair.b_OR.abs().max() > 0 for pair in lora.pairs().values())


def test_gradients_of_adapters_are_pefts(tiny_folder: Path, tmp_path: Path, naive_logits: Make) -> None:
    _, lora = adapted(tiny_folder)
    lora.save(tmp_path)
    with_gradient = naive_logits.__wrapped__  # beneath its no_grad
    with_gradient(lora.policy, TOKENS).log_softmax(-1)[:-1].gather(1, TOKENS[1:, None]).sum().backward()
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    theirs(TOKENS[None]).logits[0].log_softmax(-1)[:-1].gather(1, TOKENS[1:, None]).sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for module, pair in lora.pairs().items():
        for ours, kind in ((pair.a_RI.grad, "lora_A"), (pair.b_OR.grad, "lora_B")):
            assert ours is not None
            gradient = expected[f"base_model.model.{module}.{kind}.default.weight"]
            assert (ours - gradient).norm() <= 1e-4 * gradient.norm()


def test_back_from_the_folder(tiny_folder: Path, tmp_path: Path) -> None:
    _, lora = adapted(tiny_folder)
    lora.save(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    _, other = adapted(tiny_folder, is_moved=False)
    other.restore(tmp_path)
    assert all(tensor.equal(stored[name]) for name, tensor in other.tensors().items())
    _, fewer = adapted(tiny_folder, targets="q_proj")
    with pytest.raises(UserError, match="expected adapters of rank 4 on q_proj, got others"):
        fewer.restore(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="expected LoRA adapters, cannot read them"):
        other.restore(tmp_path)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"use_dora": True}, "expected plain LoRA adapters .* merge_and_unload"),
        ({"peft_type": "IA3"}, "expected plain LoRA adapters"),
        ({"rank_pattern": {"q_proj": 2}}, "expected plain LoRA adapters"),
        ({"base_model_name_or_path": None}, "with the name of their base"),
        ({"base_model_name_or_path": "no/such-base"}, "no such folder"),
    ],
)
def test_folders_that_are_not_ours_to_merge(
    tiny_folder: Path, tmp_path: Path, facts: dict[str, object], message: str
) -> None:
    import json

    _, lora = adapted(tiny_folder)
    lora.save(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    with pytest.raises(UserError, match=message):
        load_merged(tmp_path, dtype=torch.float32, device="cpu")


def test_adapters_on_adapters_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    adapted(tiny_folder)[1].save(tmp_path)
    merged = load_merged(tmp_path, dtype=torch.float32, device="cpu")
    with pytest.raises(UserError, match="expected a model to put adapters on, got adapters: merge them"):
        add_lora(merged, Config(lora_rank=2))


def test_without_peft_the_fix_is_said(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    loaded = load_model(str(tiny_folder), dtype=torch.float32, device="cpu")
    with pytest.raises(UserError, match=r'pip install "sparkgrpo\[lora\]", or train all weights'):
        lora_file.add_lora(loaded, Config(lora_rank=4))
