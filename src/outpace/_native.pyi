"""The C++ core (csrc/bindings.cpp). Arrays are C-contiguous and of exactly the type that is written."""

from collections.abc import Sequence
from typing import Never, overload

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I8 = NDArray[np.int8]
I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]

class Full(Exception):  # noqa: N818 (says what the model is)
    """No slot, row or position is left."""

LAYOUT: int
"""The version of the packed matrices' layout."""

def unsigned_bytes() -> bool:
    """Whether the kernel family in use wants its 8-bit weights as 0 .. 255: then they are packed otherwise."""

class Texts(Sequence[str]):
    """Many short texts in one buffer. Equal to other Texts or a list with the same ones."""

    def __init__(self, items: Sequence[str]) -> None:
        """Raises TypeError for what is no str, UnicodeEncodeError for lone surrogates."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Never: ...
    def __len__(self) -> int: ...
    @property
    def longest(self) -> int:
        """Bytes of the longest one in UTF-8; 0 where there is none."""

class Bpe:
    """Byte-pair encoding; tokens by id, merges "a b", the earliest first."""

    def __init__(self, tokens: Texts, merges: Texts) -> None:
        """Raises ValueError when a token is empty or there twice, or a merge is not two tokens whose union is one."""

    def encode(self, word: str, ignore_merges: bool) -> list[int]:
        """The ids of one word; characters that are no token leave no trace. ignore_merges: a word that is a token is
        that token."""

def strings(data: NDArray[np.uint8], at: int, count: int) -> tuple[Texts, int]:
    """GGUF strings of data from byte `at` on, at most `count`, those that are whole; and the byte after them.

    Raises UnicodeDecodeError.
    """

def isa() -> str:
    """The kernel family in use. Raises ValueError when OUTPACE_ISA names one that cannot run here."""

def isas() -> list[str]:
    """The kernel families that can run here, fastest first."""

def matmul_int8(x: F32, q: I8, scale: F32, offset: F32 | None, threads: int = 1, allow_int4: bool = True) -> F32:
    """One product as the model computes it, for tests: x [rows, in] and a matrix in groups -> [rows, out]."""

def matmul_super(
    x: F32, kind: str, q: I8, d: U16, scale: I8, dmin: U16 | None, minimum: I8 | None, threads: int = 1
) -> F32:
    """The same for a matrix in super-blocks (weights/formats.py, Supers)."""

def matmul_f32(x: F32, weight: F32, threads: int = 1) -> F32:
    """x [rows, in], weight [out, in] -> [rows, out]."""

def matmul_16(x: F32, kind: str, weight: U16, threads: int = 1) -> F32:
    """The same for the bits of weights of kind "f16" or "bf16"."""

class Config:
    """Sizes of decoder layers, as Config in csrc/stack.h."""

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        tied: bool,
        qk_norm: bool,
        experts: int,
        experts_used: int,
        expert_ffn_size: int,
        shared_ffn_size: int,
        expert_scale: float,
        norm_topk: bool,
        windows: Sequence[int],
        moe: Sequence[int],
        frequencies: Sequence[float],
        rotary_factor: float,
    ) -> None: ...

class Stack:
    """Weights, slots and KV cache of a model or a head. ValueError: a bad argument; Full: no room; MemoryError: no
    memory."""

    def put_int8(self, name: str, q: I8, scale: F32, offset: F32 | None, inputs: int) -> None: ...
    def put_super(
        self, name: str, kind: str, q: I8, d: U16, scale: I8, dmin: U16 | None, minimum: I8 | None
    ) -> None: ...
    def put_f32(self, name: str, weight: F32) -> None: ...
    def put_16(self, name: str, kind: str, weight: U16) -> None: ...
    def put_packed(self, name: str, form: Sequence[int], data: NDArray[np.uint8]) -> None:
        """A matrix as `packed` gave it. Its bytes are not copied: they must not change while the model lives."""

    def packed(self) -> list[tuple[str, list[int], NDArray[np.uint8]]]:
        """All weights as they are held: name, form (empty for a vector), bytes (a view that keeps the model alive)."""

    def put_vector(self, name: str, vector: F32) -> None: ...
    def forget(self) -> None:
        """Lets go of all weights that were given, while the model is not ready."""

    def ready(self) -> None:
        """Checks that the weights are complete; forward works from here on."""

    def new_slot(self) -> int: ...
    def free_slot(self, slot: int) -> None: ...
    def fork_slot(self, slot: int) -> int: ...
    def length(self, slot: int) -> int: ...
    def pending(self, slot: int) -> int: ...
    def commit(self, slot: int, rows: Sequence[int]) -> None: ...
    def truncate(self, slot: int, length: int) -> None: ...
    def fill_slot(self, slot: int, length: int) -> None:
        """For benchmarks: makes an empty slot hold `length` positions of random keys and values."""

    def cached(self, slot: int, layer: int) -> F32:
        """For tests: keys and values of a slot's committed rows as attention reads them,
        [2 * kv heads * length, head_dim]."""

    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that a pass of one row reads."""

    def time_stages(self, on: bool) -> list[float]:
        """Starts or ends the timing of a pass's stages, from zero. Seconds so far: rest, projections, attention, MLP,
        head."""

class Model(Stack):
    """A model and its forward pass."""

    def __init__(self, config: Config, *, slots: int, positions: int, rows: int, threads: int, cache: str) -> None: ...
    def forward(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        tokens: I64,
        parents: I64,
        wanted: I64,
        logits: F32,
        taps: Sequence[int],
        tapped: F32,
    ) -> None:
        """tokens, parents: [rows], parents within their share. wanted: ascending rows of the pass. Fills logits
        [wanted, vocab_size] and tapped [taps, rows, hidden_size]."""

class Head(Stack):
    """A learned head on a target that is ready. shape: the fields of HeadShape in csrc/head.h."""

    def __init__(
        self,
        target: Model,
        config: Config,
        shape: dict[str, object],
        *,
        slots: int,
        positions: int,
        rows: int,
        cache: str,
    ) -> None: ...
    def forward(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        tokens: I64,
        parents: I64,
        append: Sequence[bool],
        own: Sequence[bool],
        features: F32,
        owned: F32,
        wanted: I64,
        logits: F32,
        hidden: F32,
    ) -> None:
        """tokens, parents: [rows], parents as in csrc/stack.h. features: [rows of shares that are not own, feature
        width]; owned: [the other rows, H]. Fills logits [wanted, draft vocabulary] and hidden [wanted, H]."""

    def read(self, slot: int, features: F32) -> None: ...
    def block(self, slots: Sequence[int], anchors: Sequence[int], rows: int, logits: F32, hidden: F32) -> None:
        """Fills logits [slots * rows, draft vocabulary] and hidden [slots * rows, H]."""

    def markov(self, before: int, hidden: F32, state: F32, bias: F32) -> None:
        """Fills bias [draft vocabulary]; state [R] becomes the next row's."""

    def confidence(self, before: int, hidden: F32) -> float: ...

class Reader:
    """A buffer of about `bytes` that threads read as fast as memory gives it. ValueError: a bad argument."""

    def __init__(self, bytes: int, threads: int) -> None: ...
    def read(self) -> None: ...
    @property
    def bytes(self) -> int: ...

def int8_peak(threads: int, seconds: float) -> float:
    """8-bit operations a second of the dot-product instruction in use; 0 where it is not measured."""

def choose(logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float, key: int) -> int:
    """The token that sampling.py's reference chooses from logits [n] by the noise of `key`; -1 for broken logits."""

def candidates(
    logits: NDArray[np.float32],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    key: int,
    count: int,
    ids: I64 | None = None,
) -> list[tuple[int, float]]:
    """Sampler.candidates of sampling.py. ids: the tokens [n], ascending, that logits are of. [] for broken logits."""
