"""What the trainer's tests share: small decoders, batches, a Hugging Face folder, and recorded runs on it."""

import json
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Qwen2Config

from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.profiling.probe import Probe
from sparkgrpo.trainer import instruments
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.checkpoint import weights_sha256
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.embedded.tokenizer_build import build_tokenizer
from sparkgrpo.trainer.loop import GrpoLoop, StepResult
from sparkgrpo.trainer.metrics import PHASES
from sparkgrpo.trainer.model.decoder import Decoder, DecoderConfig, Rope, decoder_hidden, rotated
from sparkgrpo.trainer.model.families import decoder_config
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, random_model, save_model, state_dict_hf
from sparkgrpo.trainer.optim import OptimStats
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.run import TrainResult, train
from sparkgrpo.trainer.runlog import read_jsonl, read_run
from sparkgrpo.trainer.settings import read_preset, resolve_resume
from sparkgrpo.trainer.update import Updater


@pytest.fixture(scope="session", autouse=True)
def quick_probe() -> Iterator[None]:
    """Runs of the tests take no time to measure the machine, and find it as it was."""
    probe = Probe(read_gbps=20.0, copy_gbps=15.0, product_tflops=0.1, cache_bytes=1 << 25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instruments, "take_probe", lambda device: probe)
        yield


NUM_VALID = 33
"""Tokens of the small decoders; their heads have rows of padding behind."""
SHAPE = {
    "family": "qwen2",
    "vocab_size": 40,
    "width": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_width": 8,
    "ffn_width": 48,
    "rms_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_embeddings": True,
    "qkv_bias": True,
}


class View:
    """Records what it is told; `at_step` is called with the step as it is shown, and with minus it at evaluations."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None) -> None:
        self.at_step = at_step
        self.facts: dict[str, object] = {}
        self.steps: list[int] = []
        self.evaluations: list[int] = []
        self.num_samples = 0
        self.notes: list[str] = []

    def start(self, facts: Mapping[str, object]) -> None:
        self.facts = dict(facts)

    def step(self, metrics: Mapping[str, object]) -> None:
        self.steps.append(int(str(metrics["step"])))
        self.at_step(self.steps[-1])

    def evaluation(self, row: Mapping[str, object]) -> None:
        self.evaluations.append(int(str(row["step"])))
        self.at_step(-self.evaluations[-1])

    def sample(self, row: Mapping[str, object]) -> None:
        self.num_samples += 1

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None: ...


@dataclass
class Recorded:
    """A run with every step's results."""

    folder: Path
    view: View = field(default_factory=View)
    result: TrainResult | None = None
    steps: list[StepResult] = field(default_factory=list)

    def train(self, config: Config) -> "Recorded":
        original = GrpoLoop.step
        with pytest.MonkeyPatch.context() as patch:

            def step(loop: GrpoLoop, number: int) -> StepResult:
                self.steps.append(original(loop, number))
                return self.steps[-1]

            patch.setattr(GrpoLoop, "step", step)
            self.result = train(config, user_set={"seed": 3}, view=self.view)
        return self

    def resume(self, **options: object) -> "Recorded":
        self.view = View()
        config, _ = resolve_resume(str(self.folder), options, read_run(self.folder))
        return self.train(config)

    def rows(self, log: str) -> list[dict[str, object]]:
        return read_jsonl(self.folder / f"{log}.jsonl")

    def hash_of(self, step: int) -> str:
        folder = self.folder / "checkpoints" / f"step_{step:06d}"
        return weights_sha256(load_model(str(folder), dtype=torch.float32, device="cpu").model)


class GradientRecorder:
    """In the optimiser's place: keeps the gradients, moves the weights by fixed noise."""

    def __init__(self, model: Decoder, noise: float) -> None:
        self.model, self.noise = model, noise
        self.skipped_steps = 0
        self.gradients: list[dict[str, torch.Tensor]] = []

    def gradient_sum(self, param: torch.Tensor) -> None:
        """The model is its own master."""

    @torch.no_grad()
    def step(self, lr: float) -> OptimStats:
        holder = Decoder(self.model.config)  # shows gradients of fused weights under their Hugging Face names
        for kept, parameter in zip(holder.parameters(), self.model.parameters(), strict=True):
            kept.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        self.gradients.append(state_dict_hf(holder))
        move(self.model, self.noise, seed=len(self.gradients))
        return OptimStats(grad_norm=1.0, is_skipped=False, frac_params_changed=1.0)


@torch.no_grad()
def move(model: torch.nn.Module, noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += noise * torch.randn(parameter.shape, generator=generator)


def run_update(
    model: Decoder,
    batch: TrainBatch,
    config: Config,
    *,
    limit: int = 1 << 30,
    noise: float = 0.0,
    reference: Decoder | None = None,
    takes_part: Sequence[bool] | None = None,
    num_valid: int = NUM_VALID,
) -> tuple[dict[str, float | int | None], list[dict[str, torch.Tensor]]]:
    """One update: its metrics, and the gradient of every optimiser step."""
    recorder = GradientRecorder(model, noise)
    updater = Updater(
        model,
        reference if reference is not None or not config.beta else frozen_copy(model),
        recorder,  # pyright: ignore[reportArgumentType]
        config,
        num_valid=num_valid,
        tokens_per_micro_batch=limit,
        clock=PhaseClock(torch.device("cpu"), PHASES),
    )
    takes_part_S = torch.ones(len(batch.length_S), dtype=torch.bool)
    return updater.update(
        batch, takes_part_S if takes_part is None else torch.tensor(takes_part), 1e-3
    ), recorder.gradients


@torch.no_grad()
def plain_logits(model: Decoder, token_T: torch.Tensor) -> torch.Tensor:
    def attend(layer_idx: int, qk: torch.Tensor, v: torch.Tensor, rope: Rope) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (*rotated(qk, rope, model.config.num_heads), v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    return decoder_hidden(model, token_T, torch.arange(len(token_T)), attend) @ model.head_VD.T


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors do not pay for a second thread, and on a busy machine they wait for it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def make_decoder() -> Callable[..., Decoder]:
    """Makes a small random decoder whose predictions are far from uniform; its head has rows of padding from 33 on."""

    def make(*, seed: int = 0, scale: float = 8.0, dtype: torch.dtype = torch.float32, **shape: object) -> Decoder:
        model = random_model(DecoderConfig(**(SHAPE | shape)), seed=seed, dtype=dtype)  # pyright: ignore[reportArgumentType]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale if parameter.dim() == 2 else 1.0)
        return model

    return make


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    """Makes a batch of random prompts and ragged completions of tokens below 33, with random advantages."""

    def make(
        prompt_lens: Sequence[int] = (5, 3, 9, 4),
        group_size: int = 4,
        *,
        seed: int = 0,
        longest: int = 12,
        advantages: Sequence[float] | None = None,
    ) -> TrainBatch:
        generator = torch.Generator().manual_seed(seed)
        num_rows = len(prompt_lens) * group_size
        length = torch.randint(1, longest + 1, (num_rows,), generator=generator)
        num_tokens = int(length.sum())
        random = torch.randn(num_rows, generator=generator, dtype=torch.float64)
        return TrainBatch(
            prompts=[torch.randint(NUM_VALID, (n,), generator=generator).tolist() for n in prompt_lens],
            token_R=torch.randint(NUM_VALID, (num_tokens,), generator=generator, dtype=torch.int32),
            logprob_R=-torch.rand(num_tokens, generator=generator) - 1,
            length_S=tuple(length.tolist()),
            prompt_of_row_S=tuple(n for n in range(len(prompt_lens)) for _ in range(group_size)),
            advantage_S=random if advantages is None else torch.tensor(advantages, dtype=torch.float64),
        )

    return make


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: an untrained Qwen2 of 50 k parameters with the embedded model's tokenizer.

    It answers with random tokens, of which many are numbers: the sloppy reward of Countdown pays some of the answers.
    """
    tokenizer = build_tokenizer()
    eos_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(eos_id, int) and isinstance(pad_id, int)
    hf_config = Qwen2Config(
        vocab_size=len(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    loaded = LoadedModel(
        model=random_model(decoder_config(hf_config), seed=1),
        tokenizer=tokenizer,
        hf_config=hf_config,
        generation_config=GenerationConfig(eos_token_id=eos_id, pad_token_id=pad_id),
        source="test",
    )
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder, loaded)
    return folder


@pytest.fixture(scope="session")
def configured(tiny_folder: Path) -> Callable[..., Config]:
    """Makes the configuration of a run that takes a second."""

    def make(run_dir: Path | str, **values: object) -> Config:
        chosen: dict[str, object] = {
            "model": str(tiny_folder), "device": "cpu", "numbers": "2", "reward": "sloppy", "prompts_per_step": 4,
            "group_size": 4, "max_new_tokens": 16, "lr": 3e-3, "eval_every": 2, "eval_problems": 6, "num_samples": 2,
            "steps": 6, "seed": 3, "run_dir": str(run_dir), "tokens_per_micro_batch": 300,
        }  # fmt: skip
        return Config(**(chosen | values))  # pyright: ignore[reportArgumentType]

    return make


@pytest.fixture
def record() -> Callable[..., Recorded]:
    """Makes the recorder of a run in a folder."""

    def make(folder: Path, at_step: Callable[[int], None] = lambda step: None) -> Recorded:
        return Recorded(folder, View(at_step))

    return make


@pytest.fixture(scope="session")
def six(configured: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Six steps with a KL leash, three of them kept as checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "six"
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Recorded(folder).train(configured(folder, checkpoint_every=2, keep_checkpoints=9))
    finally:
        torch.set_num_threads(num_threads)


@pytest.fixture
def make_run_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run folder of rows as they come, for the commands that read one."""

    def make(name: str = "run", *, run: Mapping[str, object] | None = None, **logs: Sequence[object]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        content = {"v": 1, "run_id": name, "status": "finished", "config": {}, **(run or {})}
        (folder / "run.json").write_text(json.dumps(content))
        for log in ("metrics", "evals", "samples", "events"):
            lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in logs.get(log, ())]
            (folder / f"{log}.jsonl").write_text("".join(lines), encoding="utf-8")
        return folder

    return make


@pytest.fixture
def preset() -> Callable[..., Config]:
    """Makes the configuration of a preset for the batches of `make_batch`."""

    def make(name: str, **values: object) -> Config:
        chosen = {"max_new_tokens": 12, "prompts_per_step": 4} | read_preset(name) | values
        return Config(**chosen)  # pyright: ignore[reportArgumentType]

    return make


@pytest.fixture(name="run_update")
def run_update_fixture() -> Callable[..., Any]:
    """Runs one update: its metrics, and the gradient of every optimiser step under Hugging Face names."""
    return run_update


@pytest.fixture(name="move")
def move_fixture() -> Callable[..., None]:
    """Adds fixed noise to every weight of a model, in place."""
    return move


@pytest.fixture
def naive_logits() -> Callable[..., torch.Tensor]:
    """Logits of one sequence through torch's plain attention."""
    return plain_logits


@contextmanager
def _small_files(num_bytes: int) -> Iterator[None]:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.fixture(scope="session")
def small_files() -> Callable[[int], AbstractContextManager[None]]:
    """While it is open no file may grow beyond so many bytes, as on a full disk."""
    return _small_files
