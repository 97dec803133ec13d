"""Decode attention where the siblings of a group share their prompt's keys: the CPU's counterpart of paged attention.

    out_b = softmax([q_b . Kprompt_n ; q_b . Kown_b] / sqrt(E)) [Vprompt_n ; Vown_b]      n: the group of row b

The prompt's keys are read once a group: its rows' queries form one dense product. All rows are equally old, so their own
keys are one slice without a mask. One softmax spans both parts, which is the log-sum-exp merge without its empty-part
corner. Keys are stored transposed: a bf16 product with a slice of the other layout took 2.4 times as long.

Letters: N groups, B rows, K key heads, R query heads a key head (H = K R), E head width, P longest prompt, C own tokens.
Bytes a call: 2 E K (N P + B C) cache values. Work: 4 B H E (P + C) flops.
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
    B, H, E = q_BHE.shape
    K = len(k_own) // B
    rows = []
    for b in range(B):
        group = int(group_B[b])
        length = int(prompt_len_N[group])
        k = torch.cat([k_prompt.unflatten(0, (-1, K))[group, ..., :length], k_own.unflatten(0, (B, K))[b]], -1)
        v = torch.cat([v_prompt.unflatten(0, (-1, K))[group, :, :length], v_own.unflatten(0, (B, K))[b]], 1)
        q_KRE = q_BHE[b].view(K, H // K, E).double()
        rows.append((torch.softmax(q_KRE @ k.double() * E**-0.5, -1) @ v.double()).flatten(0, 1))
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
    """One decode step's attention; the softmax is in float32.

    Args:
        q_BHE: Rotated queries.
        k_prompt: [N K, E, P], v_prompt: [N K, P, E]: keys and values of each prompt.
        is_filler_NP: bool, prompt places beyond a prompt's own length; None when all prompts are equally long.
        k_own: [B K, E, C], v_own: [B K, C, E]: what each row has generated, this step's key included.
        group_B: int64, each row's group. rank_B: int64, its place among its group's rows, below num_ranks.
        num_ranks: Most rows of any group; N * num_ranks == B means that every group is full, in order.

    Returns:
        out_BHE in q's dtype.
    """
    B, H, E = q_BHE.shape
    K = len(k_own) // B
    N, P = len(k_prompt) // K, k_prompt.shape[2]
    R = H // K
    is_full = N * num_ranks == B

    def to_groups(x: torch.Tensor) -> torch.Tensor:  # [B, K, R, *] -> [N K, num_ranks R, *]; absent rows are zero
        if is_full:
            dense = x.unflatten(0, (N, num_ranks))
        else:
            dense = x.new_zeros(N, num_ranks, K, R, x.shape[-1])
            dense[group_B, rank_B] = x
        return dense.transpose(1, 2).reshape(N * K, num_ranks * R, -1)

    def to_rows(x: torch.Tensor) -> torch.Tensor:  # and back
        dense = x.view(N, K, num_ranks, R, -1).transpose(1, 2)
        return dense.flatten(0, 1) if is_full else dense[group_B, rank_B]

    q_BKRE = (q_BHE * E**-0.5).view(B, K, R, E)
    prompt_score = torch.bmm(to_groups(q_BKRE), k_prompt)
    if is_filler_NP is not None:
        prompt_score.view(N, K * num_ranks * R, P).masked_fill_(is_filler_NP[:, None], -torch.inf)
    own_score = torch.bmm(q_BKRE.reshape(B * K, R, E), k_own).view(B, K, R, -1)
    prob = torch.softmax(torch.cat((to_rows(prompt_score), own_score), -1), -1, dtype=torch.float32).to(q_BHE.dtype)
    prompt_out = to_rows(torch.bmm(to_groups(prob[..., :P]), v_prompt))
    own_out = torch.bmm(prob[..., P:].reshape(B * K, R, -1), v_own).view(B, K, R, E)
    return (prompt_out + own_out).flatten(1, 2)
