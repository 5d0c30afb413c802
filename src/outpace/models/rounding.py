"""A model's own weights at 4 bits, rounded where it hurts least, and with layers left out: what drafts for it.

Plain rounding treats all inputs of a matrix alike, but a few of them are far larger than the others and their weights
matter more. So a short text is read first, layer by layer in float32, and the mean square of every input noted; each
group of 32 weights then gets the scale for which the sum of squared errors, weighed by them, is least. The text need
not be the user's.

Neighbours: quantise.py has the plain rules, decoder.py reads the text, opening.py loads what is made here as any other
model. Sources: weighing squared errors by second moments of the inputs is the diagonal of GPTQ's Hessian (Frantar et
al. 2022, arXiv 2210.17323; the whole of it agreed less here: docs/LOG.md). Layers left out: Zhang et al. 2023 (Draft &
Verify, arXiv 2309.08168), Elhoushi et al. 2024 (LayerSkip, arXiv 2404.16710).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..config import ModelConfig
from ..types import F32, UsageError
from ..weights.formats import CHUNK, pack_q4
from ..weights.tensor import Groups, Tensor
from ..weights.weight_map import WeightMap
from .decoder import Decoder, rms_norm
from .names import EMBEDDING, FINAL_NORM, expected_tensors, is_matrix
from .quantise import FOUR_BITS, GROUP, FloatMatrix, new_cache, quantise_weights
from .rotary import rotary_tables

FACTORS = np.linspace(0.7, 1.15, 7, dtype=np.float32)  # of the plain scale: those that are tried
FLOOR = 0.01  # of the mean: no input counts for less
NOTHING = np.zeros(0, np.float32)  # of a vector, which is not rounded

# What the inputs are measured on: prose, a question, a list, code, as they come in chats.
TEXT = """The old harbour lies at the end of a narrow road. In the morning, fishermen repair their nets and talk about \
the weather; in the evening the lamps are lit and visitors walk along the wall. "How long have you lived here?" asked \
the girl. "Since 1962," he said, "when the bridge was built."

Question: What is the difference between heat and temperature?
Answer: Temperature says how hot something is. Heat is energy that moves from a warm body to a cold one. For example, \
2 litres of water need twice the heat of 1 litre to become 10 degrees warmer.

1. Write the list of what you need.
2. Compare the prices: $3.50, $12 and $199.
3. Don't forget to save your work!

def count(words):
    found = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return found
"""


class DraftWeights(WeightMap):
    """The tensors of with_layers(config, layers), matrices at 4 bits. Their kinds are known at once; they are
    made, and taken out of the source, when the first one is taken: never where a backend has them already."""

    def __init__(self, config: ModelConfig, source: WeightMap, text: Sequence[int], layers: Sequence[int]) -> None:
        """text: token ids to measure inputs on, at least one. layers: as with_layers."""
        super().__init__({})
        self._source: WeightMap | None = source
        self._config, self._text, self._layers = config, text, layers
        shapes = expected_tensors(config)
        self._kinds = {
            new: "Q4_0" if _is_rounded(config, old, shapes[old], source.kind(old)) else source.kind(old)
            for old, new in _names(config, layers).items()
            if source.has(old)
        }

    def take_tensor(self, name: str) -> Tensor:
        if self._source is not None:
            made, self._source = draft_weights(self._config, self._source, self._text, self._layers), None
            for each in made:
                self.put(each, made.take_tensor(each))
        return super().take_tensor(name)

    def clear(self) -> None:
        if self._source is not None:
            self._source.clear()
            self._source = None
        super().clear()

    def has(self, name: str) -> bool:
        return name in self._kinds if self._source is not None else super().has(name)

    def keys(self) -> list[str]:
        return list(self._kinds) if self._source is not None else super().keys()

    def kind(self, name: str) -> str:
        return self._kinds[name]


def _names(config: ModelConfig, layers: Sequence[int]) -> dict[str, str]:
    """A tensor's name in the whole model -> its name in the one with these layers."""
    names = {}
    for name in expected_tensors(config):
        _, _, rest = name.partition("model.layers.")
        layer, _, rest = rest.partition(".")
        if not rest:
            names[name] = name
        elif int(layer) in layers:
            names[name] = f"model.layers.{list(layers).index(int(layer))}.{rest}"
    return names


def _is_rounded(config: ModelConfig, name: str, shape: tuple[int, ...], kind: str) -> bool:
    """Whether a matrix goes to 4 bits: not where it has so few, nor of odd width, nor an embedding that is looked up in
    only."""
    looked_up = name == EMBEDDING and not config.tie_word_embeddings
    return is_matrix(name, shape) and not looked_up and kind not in FOUR_BITS and shape[1] % GROUP == 0


def with_layers(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """The configuration of a model that has only these layers, ascending, of another. Raises UsageError."""
    if list(layers) != sorted(set(layers)) or not layers or not 0 <= layers[0] <= layers[-1] < config.num_hidden_layers:
        raise UsageError(f"layers must be some of 0 .. {config.num_hidden_layers - 1}, ascending, got {list(layers)}")
    types = ["sliding_attention" if config.window(layer) is not None else "full_attention" for layer in layers]
    return replace(
        config,
        num_hidden_layers=len(layers),
        layer_types=tuple(types) if config.use_sliding_window else None,
        max_window_layers=min(config.max_window_layers, len(layers)),
        dense_layers=tuple(i for i, layer in enumerate(layers) if config.num_experts and not config.is_moe(layer)),
    )


def draft_weights(config: ModelConfig, weights: WeightMap, text: Sequence[int], layers: Sequence[int]) -> WeightMap:
    """The tensors of with_layers(config, layers), matrices at 4 bits.

    Takes all tensors out of `weights`, one layer at a time. text: token ids to measure the inputs on, at least one.
    Raises ModelError as quantise_weights.
    """
    shapes, kept = expected_tensors(config), _names(config, layers)
    made = WeightMap({})

    def put(name: str, tensor: Tensor, squares: F32) -> None:
        rounded = _is_rounded(config, name, tensor.shape, tensor.kind)
        made.put(kept[name], _at_four_bits(name, tensor, squares) if rounded else tensor)

    outer = {name: weights.take_tensor(name) for name in shapes if not name.startswith("model.layers.")}
    x = outer[EMBEDDING].select(np.asarray(text, dtype=np.int64)).f32()
    for layer in range(config.num_hidden_layers):
        tensors = {name: weights.take_tensor(name) for name in shapes if name.startswith(f"model.layers.{layer}.")}
        x, seen = _read(config, layer, tensors, x)
        for name in tensors.keys() & kept.keys():
            put(name, tensors[name], seen.get(name, NOTHING))
    final = rms_norm(x, outer[FINAL_NORM].f32(), config.rms_norm_eps)
    for name, tensor in outer.items():
        put(name, tensor, np.square(final).sum(axis=0))
    weights.clear()
    return made


class _Watched(FloatMatrix):
    """A float32 matrix [out, in] that sums the squares of what it multiplies."""

    def __init__(self, weight: F32) -> None:
        super().__init__(weight)
        self.squares = np.zeros(weight.shape[1], np.float32)

    def __call__(self, x: F32) -> F32:
        """float32 [in] -> [out], or a row each: [n, in] -> [n, out]."""
        self.squares += np.square(x).reshape(-1, x.shape[-1]).sum(axis=0)
        product: F32 = x @ self.weight.T
        return product


class _Layer(Decoder):
    """One layer on all rows of a text."""

    def read(self, layer: int, x: F32) -> F32:
        """float32 [n, H] -> [n, H]. Attention and experts take a row at a time, as the oracle does, the rest all."""
        config, n = self.config, len(x)
        cache = new_cache(config, n, "f32")
        cache.append(n)
        cos, sin = rotary_tables(config, np.arange(n))
        prefix = f"model.layers.{layer}."
        normed = self._norm(x, prefix + "input_layernorm.weight")
        x = x + np.stack(
            [
                self._attention(layer, prefix + "self_attn.", row, i, np.arange(i + 1), cos[i], sin[i], cache)
                for i, row in enumerate(normed)
            ]
        )
        normed = self._norm(x, prefix + "post_attention_layernorm.weight")
        if config.is_moe(layer):
            return x + np.stack([self._experts(prefix + "mlp.", row) for row in normed])
        return x + self._swiglu(prefix + "mlp.", normed)


@np.errstate(over="ignore", invalid="ignore")  # damaged weights: rounding them says so
def _read(config: ModelConfig, layer: int, tensors: dict[str, Tensor], x: F32) -> tuple[F32, dict[str, F32]]:
    """The text after this layer, and the summed squares of each matrix's inputs."""
    matrices = {name: _Watched(tensor.f32()) for name, tensor in tensors.items() if len(tensor.shape) == 2}
    vectors = {name: tensor.f32() for name, tensor in tensors.items() if len(tensor.shape) == 1}
    x = _Layer(config, matrices, vectors).read(layer, x)
    return x, {name: matrix.squares for name, matrix in matrices.items()}


def _at_four_bits(name: str, tensor: Tensor, squares: F32) -> Tensor:
    """A matrix as Q4_0, rounded where `squares` [in], the importance of its inputs, are small."""
    values = tensor.f32()
    importance = squares / max(float(squares.mean()), 1e-30) if np.isfinite(squares).all() else np.ones_like(squares)
    importance = np.maximum(importance, np.float32(FLOOR))  # inputs that were never seen count all the same
    step = max(1, CHUNK // values.shape[1])
    pieces = [pack_q4(best_q4(values[at : at + step], importance, name)) for at in range(0, len(values), step)]
    return Tensor(tensor.shape, "Q4_0", np.concatenate(pieces))


def best_q4(weight: F32, importance: F32, name: str = "without a name") -> Groups:
    """Rounds float32 [out, in] to the values that Q4_0 blocks can hold, in a multiple of 32, so that in each group the
    sum over inputs of importance [in] * squared error is the least of all scales tried: FACTORS times the plain one.

    Raises ModelError as quantise_weights, whose rounding is among those tried.
    """
    plain = quantise_weights(weight, name, "Q4_0")
    out = len(weight)
    groups = weight.reshape(out, -1, GROUP)
    importance = importance.reshape(-1, GROUP)
    q = plain.q.reshape(groups.shape).astype(np.float32)
    scale = plain.scale.copy()
    error = (np.square(groups - q * scale[..., None]) * importance).sum(axis=2)
    for tried in _scales(plain.scale):
        with np.errstate(divide="ignore", invalid="ignore"):
            rounded = np.clip(np.rint(groups / tried[..., None]), -8, 7)
        found = (np.square(groups - rounded * tried[..., None]) * importance).sum(axis=2)
        better = found < error  # never where the scale is zero: not a number is not less
        q[better], scale[better], error[better] = rounded[better], tried[better], found[better]
    return Groups(q.reshape(out, -1).astype(np.int8), scale, None)


def _scales(plain: F32) -> Iterator[F32]:
    """Scales [out, groups] to try; as a block holds them, in float16."""
    for factor in FACTORS:
        yield np.clip(plain * factor, -65504, 65504).astype(np.float16).astype(np.float32)
