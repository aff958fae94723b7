"""The common structure of every model family: an embedding, layers, a norm and a head, on a packed batch.

The class of a family makes its layers, lists their tensors per token and per sequence in `spec`, and describes in
`layouts` how its weights are named and split on disk. The engine, the cache and the loader use nothing else of it.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.ops import is_compiled, linear
from hybrid.models.engine_model import EngineModel
from hybrid.models.layers import Linear, Projections, RMSNorm, Rotary, scaled
from hybrid.models.mtp import MultiTokenPredictor
from hybrid.models.weights import Layouts, Source
from hybrid.spec import HybridSpec, LayerTensors

log: logging.Logger = logging.getLogger(__name__)

MROPE_SECTION = (11, 11, 10)
"""Number of rotary frequencies of time, height and width where the configuration has none (those of Qwen3.5)."""


def rotary_frequencies(
    config: Any, head_dim: int, layer_type: str | None = None, partly: bool = False
) -> tuple[Tensor, float]:
    """The inverse frequencies of rotary positions, those of the first half of what is turned and again those of the
    second, and the factor of their cosines and sines.

    Args:
        config: the model's configuration.
        head_dim: size of an attention head.
        layer_type: for which layers, where the configuration lists them by type.
        partly: the `partial_rotary_factor` of a configuration is heeded; most families have whole heads turned.

    Scalings other than the default are computed by transformers. Those that depend on the length of a sequence are
    fixed, so that keys do not change as it grows: `dynamic` as up to the model's own length, where it has no effect;
    `longrope` with the factors for sequences beyond the original length.

    Raises:
        ValueError: they are not finite.
    """
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = rope.get("rope_type", "default")
    with torch.device("cpu"):
        if kind == "default":
            rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0)) if partly else head_dim
            exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
            return (1.0 / (rope["rope_theta"] ** exponents)).repeat(2), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        seq_len = rope["original_max_position_embeddings"] + 1 if kind == "longrope" else None
        own = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len, **own)
        if not (frequencies.isfinite().all() and math.isfinite(scale)):
            raise ValueError(f"the rotary frequencies of {rope} are not finite")
        return frequencies.float().repeat(2), float(scale)


def unsupported_rotary(rope: Mapping[str, Any]) -> str | None:
    """Return what of rotary parameters transformers does not know; None: nothing."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope.get("rope_type", "default")
    if kind == "default" or kind in ROPE_INIT_FUNCTIONS:
        return None
    known = ", ".join(["default", *sorted(ROPE_INIT_FUNCTIONS)])
    return f"rope_type {kind!r:.50} is not supported; supported are {known}"


def angles(positions: Tensor, inverse_frequencies: Tensor, scale: float, dtype: torch.dtype) -> Rotary:
    """The angles of tokens.

    Args:
        positions: `[T, 1]`, or `[T, frequencies]` where each frequency has its own.
        inverse_frequencies: fp32, of both halves.
        scale: factor of cosines and sines.
        dtype: of the result.
    """
    compiled: Any = kernels.compiled_for("elementwise", positions)
    if compiled is not None and dtype in compiled.KINDS:
        return Rotary(*compiled.angles(positions, inverse_frequencies, scale, dtype))
    turned = positions * inverse_frequencies
    cos, sin = turned.cos(), turned.sin()
    if scale != 1:
        cos, sin = cos * scale, sin * scale
    return Rotary(cos.to(dtype), sin.to(dtype))


class TextModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: Any, layers: Iterable[nn.Module], norm: RMSNorm) -> None:
        super().__init__()
        # from_pretrained: the constructor would initialize the weight, which takes seconds on the device "meta"
        self.embed_tokens: nn.Embedding = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size)
        )
        self.layers = nn.ModuleList(layers)
        self.norm: RMSNorm = norm


class CausalLM(EngineModel, ABC):
    """A text model with its head.

    Args:
        config: its configuration, of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        head_dim: size of an attention head; 0: nothing is rotated.
        layers: each is called with `(x, residual, batch, rotary, kv, state, chunk_size)`. Its input is `x + residual`
            (residual is None for the first layer), and it returns its output as two such terms. Its `linear` is the
            mixer whose state is in state slots, its `attention` the one whose keys and values are in pages, None where
            it has none. The `layer` of a mixer is its row in the tensors of its kind, of two the same one. Where
            mixers keep different tensors of the state, each names its own in `state_names`.
        norm: the final norm.
        predictor: drafts tokens; None: the model has none, or it is not loaded.

    Attributes:
        waits_for_device: on a GPU a decode step reads a result of the device on the host, so that it cannot be
            captured.
        rotary_layers: the type of the layers with full attention, where the configuration lists rotary parameters by
            type of layer.
        rotates_partly: a part of a head may be rotated, as `partial_rotary_factor` says.
        layer_kinds: types of layers of which a model must have each.
        embedding_scale, logits_scale: factors of the embeddings, and of the logits.
        mtp: the predictor.
    """

    waits_for_device: bool = False
    rotary_layers: str | None = None
    rotates_partly: bool = False
    layer_kinds: tuple[str, ...] = ("linear_attention", "full_attention")
    embedding_scale: float = 1.0
    logits_scale: float = 1.0

    def __init__(
        self,
        config: Any,
        chunk_size: int,
        head_dim: int,
        layers: Iterable[nn.Module],
        norm: RMSNorm,
        predictor: MultiTokenPredictor | None = None,
    ) -> None:
        super().__init__(config)
        self.chunk_size = chunk_size
        self.model = TextModel(config, layers, norm)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.mtp: MultiTokenPredictor | None = predictor
        if config.tie_word_embeddings:
            self.tie_head()
        self.inverse_frequencies: Tensor
        self.rotary_scale: float
        self.inverse_frequencies, self.rotary_scale = torch.empty(0, device="cpu"), 1.0
        sections = MROPE_SECTION
        if head_dim:
            self.inverse_frequencies, self.rotary_scale = rotary_frequencies(
                config, head_dim, self.rotary_layers, self.rotates_partly
            )
            sections = config.rope_parameters.get("mrope_section", MROPE_SECTION)
        axes = torch.zeros(len(self.inverse_frequencies) // 2, dtype=torch.int64, device="cpu")
        for axis, size in enumerate(sections):
            if axis:  # height and width alternate with time: every third frequency, up to the end of their section
                axes[axis : 3 * size : 3] = axis
        self.axes: Tensor = axes.repeat(2)

    def tie_head(self) -> None:
        """Share the embedding's weight with the head."""
        self.lm_head.weight = nn.Parameter(self.model.embed_tokens.weight, requires_grad=False)

    @property
    def decode_can_be_recorded(self) -> bool:
        """Tell whether a decode step can be captured: on a GPU it does not wait for the device, as twins do; on a CPU
        its operations are compiled, and none of its modules reads on the host what they give (`reads_on_host`)."""
        if is_compiled(self.lm_head.weight.device):
            return not any(getattr(module, "reads_on_host", False) for module in self.modules())
        return kernels.uses_triton(self.lm_head.weight.device) and not self.waits_for_device

    @staticmethod
    @abstractmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations, and of weights; those of matrix products and the embedding may have another one."""
        return self.model.norm.weight.dtype

    def own_spec(self) -> HybridSpec:
        """Return the spec of this model by layers, with what its predictor keeps, which comes last."""
        spec = self.spec(self.config, self.dtype)
        tokens = tuple(tensor.name for tensor in spec.tokens)
        states = tuple(tensor.name for tensor in spec.state)
        decoder: Iterable[Any] = self.model.layers
        layers = []
        for layer in decoder:
            linear, attention = layer.linear, layer.attention
            row = next((mixer.layer for mixer in (linear, attention) if mixer is not None), 0)
            kept = () if linear is None else getattr(linear, "state_names", states)
            layers.append(LayerTensors(row, tokens if attention is not None else (), kept))
        if self.mtp is not None:
            predictor: Any = self.mtp.layers[0]
            spec = self.mtp.extend(spec, self.config.hidden_size)
            layers.append(LayerTensors(predictor.parts[1].layer, tokens))
        return replace(spec, layers=(*layers,))

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        rope = getattr(config, "rope_parameters", None)
        if rope and (message := unsupported_rotary(rope)) is not None:
            return message
        if getattr(config, "hidden_act", "silu") != "silu":
            return f"hidden_act {config.hidden_act!r} is not supported, only 'silu'"
        for kind in cls.layer_kinds:
            if kind not in config.layer_types:
                return f"no {kind} layer in layer_types; this package runs hybrid models"
        return None

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter; several layouts when there are several ways to store it."""
        return ((Source(parameter),),)

    @staticmethod
    def ignores(name: str, config: Any) -> bool:
        """Tell whether a tensor on disk is not used."""
        return False

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Run a step.

        Args:
            batch: the plan of the step.
            kv: the pages, `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; written at the batch's slots.
            state: the state pool's tensors by name; written at the batch's slots.

        Returns:
            `[S, vocab]` fp32 logits of the batch's `sample_rows`.
        """
        rotary = self._rotary_of(batch)
        embedded = self.embed(batch.token_ids)
        if batch.embedded is not None:
            embedded[batch.embedded.rows] = batch.embedded.values.to(embedded.dtype)
        x, residual = embedded, None
        arriving = batch.arriving
        layer: Any
        for index, layer in enumerate(self.model.layers):
            if arriving is not None:
                arriving.wait(index)
            x, residual = layer(x, residual, batch, rotary, kv, state, self.chunk_size)
        assert residual is not None
        if arriving is not None:
            arriving.settle()
        rows = batch.sample_rows
        # of decoded tokens, in their order, all logits are computed; padding comes after them
        takes_all = batch.prefills is None and len(rows) == len(x)
        if self.mtp is not None:
            hidden = self.model.norm.of_sum(x, residual)[1]
            self.mtp.keep(embedded, hidden, batch, rotary, kv, state)
            return self._logits(hidden if takes_all else hidden[rows], batch)
        if not takes_all:
            x, residual = x[rows], residual[rows]
        return self._logits(self.model.norm.of_sum(x, residual)[1], batch)

    def _logits(self, x: Tensor, batch: Batch) -> Tensor:
        """`[S, vocab]` fp32 of final hidden states, which are single rows."""
        decode_start = 0 if batch.is_batch_invariant else None
        logits = linear(x, self.lm_head.weight, decode_start, self.lm_head.scale).float()
        return scaled(logits, self.logits_scale)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings of tokens, `[T, hidden_size]` in the model's type."""
        x: Tensor = self.model.embed_tokens(token_ids)
        return scaled(x.to(self.dtype), self.embedding_scale)

    @torch.inference_mode()
    def draft(self, batch: Batch, hidden: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Run the predictor on one token of each of R requests.

        Args:
            batch: the tokens, as ones that are decoded.
            hidden: `[R, hidden_size]` the hidden states before them: of the model (`hybrid.models.mtp.HIDDEN` of the
                state), or of the predictor.
            kv: the pages; the predictor's keys and values are written at the batch's slots.

        Returns:
            `[R, vocab]` fp32 logits of the token after each, and the predictor's hidden states `[R, hidden_size]`.
        """
        assert self.mtp is not None
        rotary = self._rotary_of(batch)
        embedded = self.embed(batch.token_ids)
        hidden = self.mtp(embedded, hidden, batch, rotary, kv, self.chunk_size)
        return self._logits(hidden, batch), hidden

    @torch.inference_mode()
    def replay(
        self, log: Sequence[tuple[Tensor, ...]], rows: Tensor | None, steps: StateSteps, state: dict[str, Tensor]
    ) -> None:
        """Compute the states of some decoded tokens of a pass once more, and keep them.

        Args:
            log: the pass's `Batch.log`.
            rows: `[N]` the tokens, among the decoded ones of the pass; None: all of them.
            steps: where their states are read and written.
            state: the state pool's tensors by name; written.
        """
        layers: Iterable[Any] = self.model.layers
        mixers = [layer.linear for layer in layers if layer.linear is not None]
        mixers += [self.mtp.last_hidden] if self.mtp is not None else []
        for mixer, inputs in zip(mixers, log, strict=True):
            mixer.step(inputs if rows is None else tuple(part[rows] for part in inputs), steps, state)

    def _rotary_of(self, batch: Batch) -> Rotary:
        """The angles of a step's tokens. They come first: where torch computes them, all operations after them are one
        program of a pass that is captured on a CPU."""
        positions = batch.positions if batch.rotary_positions is None else batch.rotary_positions
        return self.rotary(positions, self.dtype)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """The angles of a step's tokens.

        Args:
            positions: `[T]`, or `[3, T]` rows of time, height and width, of which each frequency uses one.
            dtype: of the result.
        """
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        if not len(self.inverse_frequencies):
            nothing = self.inverse_frequencies.new_empty(positions.shape[-1], 0, dtype=dtype)
            return Rotary(nothing, nothing)
        each = positions.unsqueeze(-1) if positions.dim() == 1 else positions[self.axes.to(positions.device)].t()
        return angles(each, self.inverse_frequencies, self.rotary_scale, dtype)

    def fuse_projections(self) -> None:
        """Compute the projections of the same rows by one product each.

        Before an engine captures steps of the model. In deterministic mode only where an output is summed by itself, as
        by our Triton kernels and by compiled products: then it keeps its bits.
        """
        for module in self.modules():
            if isinstance(module, Projections):
                module.fuse()

    @property
    def prompts_can_be_recorded(self) -> bool:
        """Tell whether a graph of a pass with prompts can be captured: nothing of it depends on their numbers on the
        host. A predictor keeps the last hidden state of every prompt, also of one that is padding."""
        device = self.lm_head.weight.device
        return self.decode_can_be_recorded and kernels.uses_triton(device) and self.mtp is None
