"""What every model family is: an embedding, layers, a norm and a head, over a packed batch.

A family's class says in `spec` what its layers keep, makes its layers, and says in `layouts` how its weights are named
and cut on disk. The engine, the cache and the loader know nothing else of it.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.kernels.batch_invariant import linear
from hybrid.models.layers import Chosen, Linear, RMSNorm, Rotary
from hybrid.models.moe import Experts
from hybrid.models.weights import Layouts, Source
from hybrid.spec import HybridSpec

log = logging.getLogger(__name__)

MROPE_SECTION = (11, 11, 10)
"""Frequencies of time, height and width, unless the checkpoint says otherwise (Qwen3.5)."""


class TextModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: Any, layers: Iterable[nn.Module], norm: RMSNorm) -> None:
        super().__init__()
        # from_pretrained: an Embedding made otherwise fills itself, which costs seconds where the device is "meta"
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class CausalLM(nn.Module):
    """A text model with its head.

    Args:
        config: its configuration, of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        head_dim: size of an attention head.
        layers: each takes `(x, residual, batch, rotary, kv, state, chunk_size)`: what goes in is `x + residual`
            (residual is None for the first), and what comes out likewise.
        norm: the final norm.

    Attributes:
        waits_for_device: its own layers ask for something on the host in a decode step.
        mtp: the layers that predict tokens further ahead, when they were asked for and are there.
    """

    waits_for_device = False

    def __init__(self, config: Any, chunk_size: int, head_dim: int, layers: Iterable[nn.Module], norm: RMSNorm) -> None:
        super().__init__()
        self.config = config
        self.chunk_size = chunk_size
        self.is_batch_invariant = False
        self.model = TextModel(config, layers, norm)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.lm_head.takes_chunks = False  # only sampled rows
        self.mtp: nn.Module | None = None
        if config.tie_word_embeddings:
            self.tie_head()
        rope = config.rope_parameters
        rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        self.inverse_frequencies = 1.0 / (rope["rope_theta"] ** exponents)
        self.axes = torch.zeros(len(exponents), dtype=torch.int64, device="cpu")
        for axis, size in enumerate(rope.get("mrope_section", MROPE_SECTION)):
            if axis:  # height and width take turns with time: every third frequency, as far as their section goes
                self.axes[axis : 3 * size : 3] = axis

    def tie_head(self) -> None:
        """Let the head share the embedding's weight."""
        self.lm_head.weight = nn.Parameter(self.model.embed_tokens.weight, requires_grad=False)

    @property
    def decode_can_be_recorded(self) -> bool:
        """Whether a CUDA graph can record a decode step: nothing waits for the device. The twins do."""
        return not self.waits_for_device and kernels.uses_triton(self.lm_head.weight.device)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """What a model of this configuration keeps per token and per sequence."""
        raise NotImplementedError

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """From which tensors on disk a parameter is made; several layouts when there are several ways to store it."""
        return ((Source(parameter),),)

    @classmethod
    def predictor(cls, config: Any, num_layers: int) -> nn.Module | None:
        """The layers that predict further ahead, when the family has them."""
        return None

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Run a step.

        Args:
            kv: the pages, `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; written at the plan's slots.
            state: the state pool's tensors by name; written at the plan's slots.

        Returns:
            `[S, vocab]` fp32 logits of the plan's `sample_rows`.
        """
        x: Tensor = self.model.embed_tokens(batch.token_ids)
        if batch.embedded is not None:
            x[batch.embedded.rows] = batch.embedded.values.to(x.dtype)
        residual: Tensor | None = None
        positions = batch.positions if batch.rotary_positions is None else batch.rotary_positions
        rotary = self.rotary(positions, x.dtype)
        for layer in self.model.layers:
            x, residual = layer(x, residual, batch, rotary, kv, state, self.chunk_size)
        assert residual is not None
        rows = batch.sample_rows
        x = self.model.norm.of_sum(x[rows], residual[rows])[1]
        blocks = batch.blocks.of_single_rows(x.shape[0]) if batch.blocks is not None else None
        return linear(x, self.lm_head.weight, blocks, self.lm_head.products).float()

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """The angles of a step's tokens.

        Args:
            positions: `[T]`, or `[3, T]` rows of time, height and width, of which each frequency turns with one.
        """
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        each = positions.unsqueeze(-1) if positions.dim() == 1 else positions[self.axes.to(positions.device)].t()
        angles = each.float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))

    def make_batch_invariant(self) -> None:
        """Choose, per kind of weight, the fastest products whose rows have the same bits in every batch on this
        machine (`hybrid.kernels.batch_invariant`); kernels of ours are batch invariant by themselves."""
        if self.is_batch_invariant or kernels.uses_triton(self.lm_head.weight.device):
            return
        self.is_batch_invariant = True
        started = time.perf_counter()
        chosen: Chosen = {}
        for module in self.modules():
            if isinstance(module, Linear | Experts):
                module.make_batch_invariant(self.chunk_size, chosen)
        for (role, dtype, shape, *_), products in chosen.items():
            log.info("%s %s %s: %s", role, dtype, shape, products)
        log.info("products of %d kinds of weights chosen in %.2f s", len(chosen), time.perf_counter() - started)
