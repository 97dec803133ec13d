"""The budget before loading: its terms against the model itself, and what is refused on machines of any size."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkgrpo.profiling import memory
from sparkgrpo.profiling.memory import MemoryLimits
from sparkgrpo.trainer import run
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.memory_budget import budget_note, check_budget, training_terms
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.model.weights import decoder_shape

GIB = 1 << 30
CPU = torch.device("cpu")
CONFIG = Config(prompts_per_step=4, group_size=8, max_new_tokens=100)


def limits(usable: int, reserve: int = GIB) -> MemoryLimits:
    return MemoryLimits(available_bytes=usable + reserve, reserve_bytes=reserve, floor_bytes=0, warning_bytes=0)


def bytes_of(model: Decoder, config: Config, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, int]:
    terms = training_terms(config, model.config, dtype, torch.device(device))
    assert [term.num_bytes for term in terms] == sorted((term.num_bytes for term in terms), reverse=True)
    return {term.name: term.num_bytes for term in terms}


def test_terms_of_an_fp32_model(make_decoder: Callable[..., Decoder]) -> None:
    model = make_decoder()
    num = sum(p.numel() for p in model.parameters())
    found = bytes_of(model, CONFIG)
    assert found["weights"] == found["gradients"] == found["reference"] == 4 * num
    assert found["optimiser moments"] == 8 * num and "fp32 masters" not in found and "graphs" not in found
    assert found["loader peak"] == 4 * max(p.numel() for p in model.parameters())
    assert "reference" not in bytes_of(model, replace(CONFIG, beta=0.0))


def test_terms_of_a_bf16_model(make_decoder: Callable[..., Decoder]) -> None:
    """fp32 masters beside bf16 weights: 18 bytes a parameter with a reference, 16 without."""
    model = make_decoder()
    num = sum(p.numel() for p in model.parameters())
    found = bytes_of(model, CONFIG, torch.bfloat16)
    assert (found["weights"], found["fp32 masters"], found["gradients"]) == (2 * num, 4 * num, 4 * num)


def test_longer_and_wider_costs_more(make_decoder: Callable[..., Decoder]) -> None:
    model = make_decoder()
    before = bytes_of(model, CONFIG)
    longer = bytes_of(model, replace(CONFIG, max_new_tokens=1000))
    wider = bytes_of(model, replace(CONFIG, group_size=16))
    assert longer["activations of a micro-batch"] > before["activations of a micro-batch"]
    assert wider["keys and values"] == 2 * before["keys and values"]


def test_refused_with_three_terms_and_their_flags(make_decoder: Callable[..., Decoder]) -> None:
    terms = training_terms(replace(CONFIG, max_new_tokens=10_000_000), make_decoder().config, torch.float32, CPU)
    with pytest.raises(UserError) as caught:
        check_budget(terms, limits(2 * GIB))
    message = str(caught.value)
    assert "and 2.00 GiB can be used (3.00 GiB available less a reserve of 1.00 GiB); nothing was loaded" in message
    largest = message.partition("three largest terms: ")[2].split("; ")
    assert len(largest) == 3 and all("(less with " in term for term in largest)
    assert largest[0].startswith("activations of a micro-batch") and "--max-new-tokens" in largest[0]


def test_what_just_fits_is_not_refused(make_decoder: Callable[..., Decoder]) -> None:
    terms = training_terms(CONFIG, make_decoder().config, torch.float32, CPU)
    needed = sum(term.num_bytes for term in terms)
    check_budget(terms, limits(needed))
    with pytest.raises(UserError):
        check_budget(terms, limits(needed - 1))


def test_a_system_that_does_not_say(make_decoder: Callable[..., Decoder]) -> None:
    terms = training_terms(CONFIG, make_decoder().config, torch.float32, CPU)
    unknown = replace(limits(0), available_bytes=None)
    check_budget(terms, unknown)
    assert "this system does not say how much there is" in budget_note(terms, unknown)


def test_a_run_prints_its_budget_first(six: Any) -> None:
    assert six.view.notes[0].startswith("memory: at least ") and "weights" in six.view.notes[0]
    assert "can be used (" in six.view.notes[0]


def test_a_run_that_cannot_fit_loads_nothing(
    configured: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Callable[..., Any]
) -> None:
    """A meminfo of our own: 1.1 GiB available, of which 1 GiB is the reserve."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 9999999 kB\nMemAvailable: {int(1.1 * GIB) // 1024} kB\n")
    real = memory.host_available_bytes
    monkeypatch.setattr(memory, "host_available_bytes", lambda: real(meminfo, tmp_path, tmp_path / "none"))
    monkeypatch.setattr(run, "load_model", lambda *a, **k: pytest.fail("weights were loaded"))
    config = configured(tmp_path / "run", max_new_tokens=100_000)
    with pytest.raises(UserError, match="nothing was loaded"):
        record(tmp_path / "run").train(config)
    assert not (tmp_path / "run").exists()


def test_shape_without_weights(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text((tiny_folder / "config.json").read_text())
    assert decoder_shape(str(folder)) == decoder_shape(str(tiny_folder))
    with pytest.raises(UserError):
        decoder_shape(str(tmp_path / "nothing"))


def test_adapters_train_little_and_copy_what_they_are_merged_into(make_decoder: Callable[..., Decoder]) -> None:
    """Rank 4 on q and down: moments and gradients of the adapters alone, no reference, two projections twice."""
    model = make_decoder()
    shape = model.config
    found = bytes_of(model, replace(CONFIG, lora_rank=4, lora_targets="q_proj,down_proj"))
    adapters = shape.num_layers * 4 * ((32 + 32) + (48 + 32))
    assert found["optimiser moments"] == 8 * adapters and found["gradients"] == 4 * adapters
    assert found["merged copies"] == 4 * shape.num_layers * (32 * 32 + 48 * 32) and "reference" not in found


def test_activation_checkpointing_is_counted(make_decoder: Callable[..., Decoder]) -> None:
    model = make_decoder(num_layers=4)
    found = [bytes_of(model, replace(CONFIG, activation_checkpointing=on)) for on in (False, True)]
    assert found[1]["activations of a micro-batch"] < found[0]["activations of a micro-batch"]
