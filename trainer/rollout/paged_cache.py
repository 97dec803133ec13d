"""The GPU's cache: pages of 16 tokens, a prompt's shared by its siblings, a wave's reserved before its first token.

Nothing moves, grows or is read on the host while a wave decodes: a block table says where a row's pages lie, and which
slot a row computes in decides which line of the table it reads.

Letters: B slots, N groups (one prompt each), G siblings, M pages a row, H query heads, K key heads (J = H + K), E head
width, T packed prompt tokens, L layers.
"""

from collections.abc import Sequence

import torch

from sparkgrpo.kernels.kv_cache import PAGE_TOKENS, copy_pages, rotate_and_write, write_pages
from sparkgrpo.kernels.paged_attention import AttentionScratch, paged_attention
from sparkgrpo.kernels.prefix_attention import TreeLayout
from sparkgrpo.trainer.model.decoder import Decoder, DecoderConfig, Rope
from sparkgrpo.trainer.rollout.pages import PagePool, WavePlan, plan_wave


class PagedCache:
    """Keys and values of a wave in pages.

    Args:
        max_tokens: Most tokens of a row, prompt and completion.
        num_pages: Pages of each layer, page 0 included, which belongs to nobody.
        context_len_B: The state's, read by every step: tokens of each slot's row, 0 where it is parked.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        max_rows: int,
        max_tokens: int,
        num_pages: int,
        context_len_B: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        device = context_len_B.device
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        shape = (config.num_layers, num_pages, PAGE_TOKENS, config.num_kv_heads, config.head_width)
        self.k_pages = torch.zeros(shape, dtype=dtype, device=device)
        self.v_pages = torch.zeros(shape, dtype=dtype, device=device)
        M = -(-max_tokens // PAGE_TOKENS)
        self.block_table_BM = torch.zeros(max_rows, M, dtype=torch.int32, device=device)
        self.context_len_B = context_len_B
        self.scratch = AttentionScratch.allocate(
            max_rows=max_rows, num_heads=config.num_heads, width=config.head_width, num_pages=M, device=device
        )
        self.pool = PagePool(num_pages)
        self.plan: WavePlan | None = None
        self.prompt_len_N: Sequence[int] = ()
        self.page_slot_T = torch.zeros(0, dtype=torch.int64, device=device)
        """Places of the prompt tokens that are being written."""

    def begin(self, prompt_len_N: Sequence[int], G: int, max_new_tokens: int) -> None:
        """Reserve all pages of a wave of G siblings for each prompt."""
        self.end_wave()
        self.plan = plan_wave(self.pool, prompt_len_N, G, max_new_tokens)
        self.prompt_len_N = prompt_len_N
        table_BM = torch.tensor(self.plan.block_table(self.block_table_BM.shape[1]), dtype=torch.int32)
        self.block_table_BM.zero_()
        self.block_table_BM[: len(table_BM)] = table_BM.to(self.block_table_BM.device)

    def write_prompt(
        self, layer_idx: int, prompts: range, k_TKE: torch.Tensor, v_TKE: torch.Tensor, layout: TreeLayout
    ) -> None:
        """A layer's rotated keys and its values of these prompts, packed one after the other."""
        if layer_idx == 0:
            places = [self._places_of_prompt(n) for n in prompts]
            self.page_slot_T = torch.cat(places).to(k_TKE.device)
        write_pages(k_TKE, v_TKE, self.k_pages[layer_idx], self.v_pages[layer_idx], self.page_slot_T)

    def _places_of_prompt(self, n: int) -> torch.Tensor:
        """page * 16 + offset of every token of a prompt, int64 on the host."""
        assert self.plan is not None, "begin reserves the pages"
        page_M = torch.tensor(self.plan.prompt_pages[n], dtype=torch.int64)
        token_P = torch.arange(self.prompt_len_N[n])
        return page_M[token_P // PAGE_TOKENS] * PAGE_TOKENS + token_P % PAGE_TOKENS

    def end_prompts(self) -> None:
        """Copy each prompt's partial page to the siblings of its first row, all layers at once."""
        assert self.plan is not None, "begin reserves the pages"
        if not self.plan.copies:
            return
        source_C, target_C = torch.tensor(self.plan.copies, dtype=torch.int64).to(self.k_pages.device).unbind(1)
        copy_pages(self.k_pages, self.v_pages, source_C.contiguous(), target_C.contiguous())

    def extend(self) -> None:
        """There is room for all tokens of the wave."""

    def attend(self, layer_idx: int, qk_BJE: torch.Tensor, v_BKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Turn queries and keys, write this step's key and value, then attend: the `attend` of a decode step."""
        B, k_pages, v_pages = len(qk_BJE), self.k_pages[layer_idx], self.v_pages[layer_idx]
        table_BM, context_len_B = self.block_table_BM[:B], self.context_len_B[:B]
        q_BHE = rotate_and_write(
            qk_BJE[:, : self.num_heads],
            qk_BJE[:, self.num_heads :],
            v_BKE,
            *rope,
            k_pages,
            v_pages,
            table_BM,
            context_len_B,
        )
        return paged_attention(q_BHE, k_pages, v_pages, table_BM, context_len_B, scratch=self.scratch)

    def keep(self, slot_B: torch.Tensor) -> None:
        """The table's lines move with their slots; pages stay where they are."""
        self.block_table_BM[: len(slot_B)] = self.block_table_BM[slot_B]

    def end_wave(self) -> None:
        """Give the wave's pages back."""
        if self.plan is not None:
            for pages in self.plan.row_pages:
                self.pool.release(pages)
            self.plan = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, what a decode step reads and writes."""
        scratch = {"top_P": self.scratch.top_P, "total_P": self.scratch.total_P, "acc_PE": self.scratch.acc_PE}
        return {"k_pages": self.k_pages, "v_pages": self.v_pages, "block_table_BM": self.block_table_BM} | scratch


def page_bytes(model: Decoder) -> int:
    """One page of 16 tokens, keys and values, in all layers."""
    shape = model.config
    token_numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_width
    return PAGE_TOKENS * token_numbers * model.dtype.itemsize
