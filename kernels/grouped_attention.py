"""Decode attention where the siblings of a group share their prompt's keys: the CPU's counterpart of paged attention.

    out_b = softmax([q_b . Kprompt_n ; q_b . Kown_b] / sqrt(E)) [Vprompt_n ; Vown_b]      n: the group of row b

The prompt's keys are read once a group: its rows' queries form one dense product. All rows are equally old, so their
own keys are one slice without a mask. One softmax spans both parts, which is the log-sum-exp merge without its empty-
part corner. Keys are stored transposed: a bf16 product with a slice of the other layout took 2.4 times as long. The key
head is the outermost axis: rows of a full group are then neighbours in every operand, and nothing is copied between the
products.

Letters: N groups, B rows, K key heads, R query heads a key head (H = K R), E head width, P longest prompt, C own
tokens. Bytes a call: 2 E K (N P + B C) cache values. Work: 4 B H E (P + C) flops.
"""

import torch


def grouped_attention_reference(
    q_BHE: torch.Tensor,
    k_prompt: torch.Tensor,
    v_prompt: torch.Tensor,
    prompt_len_N: torch.Tensor,
    k_own: torch.Tensor,
    v_own: torch.Tensor,
    group_B: torch.Tensor,
) -> torch.Tensor:
    """The specification: each row alone, in float64; arguments as in `grouped_attention`."""
    _, H, E = q_BHE.shape
    K = len(k_own)
    rows = []
    for b, q_HE in enumerate(q_BHE.double()):
        group = int(group_B[b])
        length = int(prompt_len_N[group])
        k = torch.cat([k_prompt[:, group, :, :length], k_own[:, b]], -1).double()
        v = torch.cat([v_prompt[:, group, :length], v_own[:, b]], 1).double()
        q_KRE = q_HE.view(K, H // K, E)
        rows.append((torch.softmax(q_KRE @ k * E**-0.5, -1) @ v).flatten(0, 1))
    return torch.stack(rows).to(q_BHE.dtype)


def grouped_attention(
    q_BHE: torch.Tensor,
    k_prompt: torch.Tensor,
    v_prompt: torch.Tensor,
    is_filler_NP: torch.Tensor | None,
    k_own: torch.Tensor,
    v_own: torch.Tensor,
    group_B: torch.Tensor,
    rank_B: torch.Tensor,
    num_ranks: int,
) -> torch.Tensor:
    """One decode step's attention; the softmax is in float32 or wider.

    Args:
        q_BHE: Rotated queries.
        k_prompt: [K, N, E, P], v_prompt: [K, N, P, E]: keys and values of each prompt; finite in the filler too.
        is_filler_NP: bool, prompt places beyond a prompt's own length; None when all prompts are equally long.
        k_own: [K, B, E, C], v_own: [K, B, C, E]: what each row has generated, this step's key included.
        group_B: int64, each row's group. rank_B: int64, its place among its group's rows, below num_ranks.
        num_ranks: Most rows of any group; N * num_ranks == B means that every group is full, in order.

    Returns:
        out_BHE in q's dtype.
    """
    B, H, E = q_BHE.shape
    K, N, _, P = k_prompt.shape
    R = H // K
    is_full = N * num_ranks == B

    def to_groups(x: torch.Tensor) -> torch.Tensor:  # [K, B, R, *] -> [K, N, num_ranks R, *]; absent rows are zero
        if not is_full:
            dense = x.new_zeros(K, N, num_ranks, *x.shape[2:])
            dense[:, group_B, rank_B] = x
            x = dense
        return x.reshape(K, N, num_ranks * R, -1)

    def to_rows(x: torch.Tensor) -> torch.Tensor:  # and back
        dense = x.view(K, N, num_ranks, R, -1)
        return dense.flatten(1, 2) if is_full else dense[:, group_B, rank_B]

    q_KBRE = (q_BHE * E**-0.5).view(B, K, R, E).transpose(0, 1).contiguous()
    prompt_score = to_groups(q_KBRE) @ k_prompt
    if is_filler_NP is not None:
        prompt_score.masked_fill_(is_filler_NP[:, None], -torch.inf)
    score = torch.cat((to_rows(prompt_score), q_KBRE @ k_own), -1)
    wide = torch.promote_types(q_BHE.dtype, torch.float32)
    prob = torch.softmax(score, -1, dtype=wide).to(q_BHE.dtype)
    out_KBRE = to_rows(to_groups(prob[..., :P]) @ v_prompt) + prob[..., P:] @ v_own
    return out_KBRE.transpose(0, 1).reshape(B, H, E)
