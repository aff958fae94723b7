"""The common structure of every model family: an embedding, layers, a norm and a head, on a packed batch.

A family is a class that says of which parts its layers consist (`blocks`), and where it differs from the others: in
numbers, in names on disk, in what it refuses. What a model keeps per token and per sequence (`spec`) follows from its
mixers. The engine, the cache and the loader use nothing else of it.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.ops import is_compiled, linear
from hybrid.models.attention import head_dim_of
from hybrid.models.engine_model import EngineModel
from hybrid.models.layers import Linear, Projections, RMSNorm, Rotary, norm_eps, scaled
from hybrid.models.mixers import Block, Context, Layer, Mixer, StateMixer
from hybrid.models.mtp import MultiTokenPredictor
from hybrid.models.weights import Layouts, renamed, with_names
from hybrid.spec import HybridSpec, LayerTensors, StateTensor, TokenTensor

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


class Factors(NamedTuple):
    """Factors of the embeddings, of what a block of a layer gives, and of the logits."""

    embeddings: float = 1.0
    blocks: float = 1.0
    logits: float = 1.0


class TextModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: Any, layers: Iterable[Layer], norm: RMSNorm) -> None:
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
        has_predictor: the checkpoint has a predictor, and it is loaded.

    Attributes:
        layer_kinds: types of layers of which a model must have each.
        norm_offset: of the norms of layers and the final norm, as of `RMSNorm`.
        rotary_layers: the type of the layers with full attention, where the configuration lists rotary parameters by
            type of layer.
        is_rotated: queries and keys are rotated by their positions.
        rotates_partly: a part of a head may be rotated, as `partial_rotary_factor` says.
        names_on_disk: parts of the names of parameters and what they are on disk; several where there are several ways
            to store a model.
        parts_on_disk: functions that know parameters which are stored in parts, or as a part: of the name of another
            one they return None.
        mtp: the predictor, which drafts tokens; None: there is none.
        mixers: those of all layers.
    """

    layer_kinds: tuple[str, ...] = ("linear_attention", "full_attention")
    norm_offset: float = 0.0
    rotary_layers: str | None = None
    is_rotated: bool = True
    rotates_partly: bool = False
    names_on_disk: tuple[Mapping[str, str], ...] = ({},)
    parts_on_disk: tuple[Callable[[str, Any], Layouts | None], ...] = ()

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        super().__init__(config)
        self.chunk_size = chunk_size
        self.model = TextModel(config, self.layers(config), self.norm(config))
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.mtp: MultiTokenPredictor | None = self.predictor(config) if has_predictor else None
        self.mixers = [mixer for layer in self.all_layers for mixer in layer.mixers]
        number_rows(self.mixers)
        self.factors = self.factors_of(config)
        if config.tie_word_embeddings:
            self.tie_head()
        self.inverse_frequencies, self.rotary_scale = torch.empty(0, device="cpu"), 1.0
        sections = MROPE_SECTION
        if head_dim := self.rotated_dim(config):
            self.inverse_frequencies, self.rotary_scale = rotary_frequencies(
                config, head_dim, self.rotary_layers, self.rotates_partly
            )
            sections = config.rope_parameters.get("mrope_section", MROPE_SECTION)
        axes = torch.zeros(len(self.inverse_frequencies) // 2, dtype=torch.int64, device="cpu")
        for axis, size in enumerate(sections):
            if axis:  # height and width alternate with time: every third frequency, up to the end of their section
                axes[axis : 3 * size : 3] = axis
        self.axes: Tensor = axes.repeat(2)

    @classmethod
    @abstractmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer.

        Args:
            kind: its type.
            index: its number.
        """

    @classmethod
    def layer(cls, config: Any, kind: str, index: int) -> Layer:
        """Make a layer."""
        return Layer(partial(cls.norm, config), *cls.blocks(config, kind, index), scale=cls.factors_of(config).blocks)

    @classmethod
    def layers(cls, config: Any) -> list[Layer]:
        """Make all layers of a model."""
        return [cls.layer(config, kind, index) for index, kind in enumerate(cls.kinds(config))]

    @classmethod
    def kinds(cls, config: Any) -> Sequence[str]:
        """Return the types of all layers."""
        kinds: Sequence[str] | None = getattr(config, "layer_types", None)
        return kinds or ["full_attention"] * config.num_hidden_layers

    @classmethod
    def norm(cls, config: Any) -> RMSNorm:
        """Make a norm of rows."""
        return RMSNorm(config.hidden_size, norm_eps(config), cls.norm_offset)

    @classmethod
    def predictor(cls, config: Any) -> MultiTokenPredictor | None:
        """Make the predictor; None: the family has none here."""
        return None

    @classmethod
    def factors_of(cls, config: Any) -> Factors:
        """Return the factors of a model."""
        return Factors()

    @classmethod
    def rotated_dim(cls, config: Any) -> int:
        """Return the size of a head that is rotated; 0: none is."""
        return head_dim_of(config) if cls.is_rotated else 0

    def tie_head(self) -> None:
        """Share the embedding's weight with the head."""
        self.lm_head.weight = nn.Parameter(self.model.embed_tokens.weight, requires_grad=False)

    @property
    def all_layers(self) -> list[Layer]:
        """The layers in the order in which they compute, those of the predictor last."""
        layers: Iterable[Any] = (*self.model.layers, *(self.mtp.layers if self.mtp is not None else ()))
        return [*layers]

    @property
    def waits_for_device(self) -> bool:
        """Tell whether a decode step on a GPU reads a result of the device on the host."""
        return any(mixer.waits_for_device for mixer in self.mixers)

    @property
    def decode_can_be_recorded(self) -> bool:
        """Tell whether a decode step can be captured: on a GPU it does not wait for the device, as twins do; on a CPU
        its operations are compiled, and none of its modules reads on the host what they give (`reads_on_host`)."""
        if is_compiled(self.lm_head.weight.device):
            return not any(getattr(module, "reads_on_host", False) for module in self.modules())
        return kernels.uses_triton(self.lm_head.weight.device) and not self.waits_for_device

    @classmethod
    def spec(cls, config: Any, dtype: torch.dtype) -> HybridSpec:
        """Return the tensors per token and per sequence of a model of this configuration."""
        with torch.device("meta"):
            layers = cls.layers(config)
        number_rows(mixer for layer in layers for mixer in layer.mixers)
        return spec_of(config, layers, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations, and of weights; those of matrix products and the embedding may have another one."""
        return self.model.norm.weight.dtype

    def own_spec(self) -> HybridSpec:
        """Return the spec of this model, with what its predictor keeps, which comes last."""
        spec = spec_of(self.config, self.all_layers, self.dtype)
        return spec if self.mtp is None else replace(spec, state=(*spec.state, *self.mtp.last_hidden.kept(self.dtype)))

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        rope = getattr(config, "rope_parameters", None)
        if rope and (message := unsupported_rotary(rope)) is not None:
            return message
        if getattr(config, "hidden_act", "silu") != "silu":
            return f"hidden_act {config.hidden_act!r} is not supported, only 'silu'"
        for kind in cls.layer_kinds:
            if kind not in cls.kinds(config):
                return f"no {kind} layer in layer_types; this package runs hybrid models"
        return None

    @classmethod
    def layouts(cls, parameter: str, config: Any) -> Layouts:
        """Return the tensors on disk that make up a parameter; several layouts when there are several ways to store
        it."""
        known = (found for stored in cls.parts_on_disk if (found := stored(parameter, config)) is not None)
        found = next(known, renamed(parameter, {}))
        return [layout for names in cls.names_on_disk for layout in with_names(found, names)]

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
        context = Context(batch, rotary, kv, state, self.chunk_size)
        arriving = batch.arriving
        layer: Any
        for index, layer in enumerate(self.model.layers):
            if arriving is not None:
                arriving.wait_for_layer(index)
            x, residual = layer(x, residual, context)
        assert residual is not None
        if arriving is not None:
            arriving.wait_for_all()
        rows = batch.sample_rows
        # of decoded tokens, in their order, all logits are computed; padding comes after them
        takes_all = batch.prefills is None and len(rows) == len(x)
        if self.mtp is not None:
            hidden = self.model.norm.of_sum(x, residual)[1]
            self.mtp.keep(embedded, hidden, context)
            return self._logits(hidden if takes_all else hidden[rows], batch)
        if not takes_all:
            x, residual = x[rows], residual[rows]
        return self._logits(self.model.norm.of_sum(x, residual)[1], batch)

    def _logits(self, x: Tensor, batch: Batch) -> Tensor:
        """`[S, vocab]` fp32 of final hidden states, which are single rows."""
        decode_start = 0 if batch.is_batch_invariant else None
        logits = linear(x, self.lm_head.weight, decode_start, self.lm_head.scale).float()
        return scaled(logits, self.factors.logits)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings of tokens, `[T, hidden_size]` in the model's type."""
        x: Tensor = self.model.embed_tokens(token_ids)
        return scaled(x.to(self.dtype), self.factors.embeddings)

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
        context = Context(batch, self._rotary_of(batch), kv, {}, self.chunk_size)
        embedded = self.embed(batch.token_ids)
        hidden = self.mtp(embedded, hidden, context)
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
        mixers = [mixer for mixer in self.mixers if isinstance(mixer, StateMixer)]
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


def number_rows(mixers: Iterable[Mixer]) -> None:
    """Give each mixer of a model its row in the tensors that it keeps, which all mixers that keep them share."""
    counts: Counter[str] = Counter()
    for mixer in mixers:
        names = [tensor.name for tensor in mixer.kept(torch.float32)]
        mixer.row = counts[names[0]]
        counts.update(names)


def spec_of(config: Any, layers: Iterable[Layer], dtype: torch.dtype) -> HybridSpec:
    """Return what layers keep, whose mixers have rows.

    Args:
        config: of their model.
        dtype: of their model.
    """
    tokens: dict[str, TokenTensor] = {}
    states: dict[str, StateTensor] = {}
    listed = []
    for layer in layers:
        row = 0
        own: tuple[list[str], list[str]] = [], []
        for mixer in layer.mixers:
            row = mixer.row
            for tensor in mixer.kept(dtype):
                if isinstance(tensor, TokenTensor):
                    tokens[tensor.name] = replace(tensor, outer=(row + 1, *tensor.outer[1:]))
                    own[0].append(tensor.name)
                else:
                    states[tensor.name] = replace(tensor, shape=(row + 1, *tensor.shape[1:]))
                    own[1].append(tensor.name)
        listed.append(LayerTensors(row, *map(tuple, own)))
    if not tokens:  # pages are empty
        nothing = TokenTensor.kv(0, config.num_key_value_heads, head_dim_of(config), dtype)
        tokens[nothing.name] = nothing
    return HybridSpec((*tokens.values(),), (*states.values(),), (*listed,))
