"""What every op does at its door: checks of the arguments, each a `ValueError` that says what was expected, what came
and what to do. A check that would have to wait for a device (the values of a CUDA tensor) is made on the CPU alone.

T rows, V vocabulary, D width.
"""

import difflib
import math
from collections.abc import Sequence

import torch

MAX_ROWS = 1 << 24
MAX_VOCAB = 1 << 20


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError with the nearest allowed name when `value` is none of them."""
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.0)[0]
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}; did you mean {near!r}?")


def check_matrix(name: str, matrix: torch.Tensor) -> None:
    """Raises ValueError unless `matrix` is a 2-D bf16 or fp32 tensor of at least one column."""
    if not isinstance(matrix, torch.Tensor) or matrix.ndim != 2:
        came = tuple(matrix.shape) if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise ValueError(f"{name} must be a 2-D tensor, got {came}; flatten leading dimensions into rows first")
    if matrix.dtype not in (torch.bfloat16, torch.float32):
        why = "; fp16 loses gradients of 1/65,536 tokens: use bfloat16" if matrix.dtype == torch.float16 else ""
        raise ValueError(f"{name} must be bfloat16 or float32, got {matrix.dtype}{why}")
    if matrix.shape[1] < 1:
        raise ValueError(f"{name} must have at least one column, got shape {tuple(matrix.shape)}")


def check_head(hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> None:
    """Raises ValueError unless hidden [T, D] and weight [V, D] can be multiplied by the head ops."""
    check_matrix("hidden_TD", hidden_TD)
    check_matrix("weight_VD", weight_VD)
    if hidden_TD.dtype != weight_VD.dtype:
        raise ValueError(
            f"hidden_TD and weight_VD must have one dtype, got {hidden_TD.dtype} and {weight_VD.dtype}; cast one to the"
            " other's"
        )
    if hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden_TD and weight_VD must have one width D, got {tuple(hidden_TD.shape)} and {tuple(weight_VD.shape)};"
            " the weight is [V, D], not [D, V]"
        )
    check_device("weight_VD", weight_VD, hidden_TD.device)
    V, D = weight_VD.shape
    if not 1 <= V <= MAX_VOCAB or hidden_TD.shape[0] > MAX_ROWS:
        raise ValueError(
            f"the head takes 1 to {MAX_VOCAB:,} words and at most {MAX_ROWS:,} rows, got {V:,} and"
            f" {hidden_TD.shape[0]:,}; split the batch"
        )
    if (D > 1 and weight_VD.stride(1) != 1) or (V > 1 and weight_VD.stride(0) < D):
        raise ValueError(
            f"weight_VD must have contiguous rows, got strides {weight_VD.stride()} for shape {(V, D)}; store it as"
            " [V, D], or call .contiguous() once and keep the result"
        )


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises ValueError unless `tensor` lies on `device`."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like the other inputs, got {tensor.device}; move it first")


def check_row_input(
    name: str,
    values_T: torch.Tensor | None,
    num_rows: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    *,
    is_optional: bool = False,
) -> None:
    """Raises ValueError unless `values_T` is data of shape [T]: right dtype, right device, no gradient."""
    if values_T is None and is_optional:
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(values_T, torch.Tensor):
        raise ValueError(f"{name} must be a tensor of shape [{num_rows}], got {type(values_T).__name__}")
    if tuple(values_T.shape) != (num_rows,):
        raise ValueError(f"{name} must have shape [{num_rows}], one value a row, got {tuple(values_T.shape)}")
    if values_T.dtype not in dtypes:
        raise ValueError(f"{name} must be {wanted}, got {values_T.dtype}; convert it with .to()")
    check_device(name, values_T, device)
    if values_T.requires_grad:
        raise ValueError(f"{name} is data and gets no gradient, but requires_grad is True; pass {name}.detach()")


def check_temperature(temperature: float | torch.Tensor, num_rows: int, device: torch.device) -> None:
    """Raises ValueError unless the temperature is a positive number, or fp32 [T] (values are checked where used)."""
    if isinstance(temperature, torch.Tensor):
        check_row_input("temperature", temperature, num_rows, device)
    elif isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise ValueError(f"temperature must be a number or a float32 tensor [T], got {type(temperature).__name__}")
    elif not 0 < temperature < math.inf:  # what a compiler can trace with a symbolic number
        raise ValueError(
            f"temperature must be finite and above 0, got {temperature}; for greedy decoding take the largest logit"
        )


def check_num_valid(num_valid: int | None, vocab: int) -> int:
    """The number of columns that exist: `num_valid`, or all. Raises ValueError unless it is in [1, V]."""
    if num_valid is None:
        return vocab
    if not isinstance(num_valid, int) or not 1 <= num_valid <= vocab:
        raise ValueError(f"num_valid must be an int in [1, {vocab}] (len(tokenizer)), got {num_valid!r}")
    return num_valid


def check_chunk_tokens(chunk_tokens: int | None) -> None:
    """Raises ValueError unless the rows a chunk are None (the op chooses) or a positive int."""
    if chunk_tokens is not None and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens must be None or a positive number of rows, got {chunk_tokens!r}")


def check_counted_rows(target_N: torch.Tensor, temperature_N: float | torch.Tensor, num_valid: int) -> None:
    """On the CPU: raises ValueError for a counted target outside [0, num_valid) or a temperature not above 0.

    On CUDA nothing is read: there such a row's log-prob is NaN.
    """
    if target_N.device.type != "cpu" or target_N.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(target_N))
    if low < 0 or high >= num_valid:
        raise ValueError(
            f"target_id_T of a row that counts must be in [0, {num_valid}), got {low if low < 0 else high}; there is no"
            " ignore index: give the row weight 0 (or is_active_T False) and its target is never read"
        )
    if isinstance(temperature_N, torch.Tensor) and not bool((temperature_N > 0).all()):
        raise ValueError(f"temperature of every row that counts must be above 0, got {float(temperature_N.min())}")


def refuse_second_order(op: str) -> None:
    """Called in a backward: raises RuntimeError when it is run with create_graph, whose result would lack our part."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{op} has no second derivative: call backward without create_graph, or use {op}_reference, which has one"
        )
