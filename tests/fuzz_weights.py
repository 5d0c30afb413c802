"""Mutates one small model file many times and reads every mutant; run by test_weights_fuzz.py in a process of its own.

Usage: python fuzz_weights.py KIND FOLDER CASES. Every mutant must load to well-shaped tensors or raise ModelError.
Prints how many loaded and how many were refused. The process may use 512 MB more than it has at the start, and 20 s a
case: a file that makes the reader allocate wildly or hang ends it with an error.
"""

import json
import re
import resource
import signal
import struct
import sys
from pathlib import Path

import numpy as np

from outpace.types import ModelError
from outpace.weights.formats import KINDS
from outpace.weights.gguf import GGUFFile, write_gguf
from outpace.weights.safetensors import read_safetensors, write_safetensors
from outpace.weights.tensor import Tensor

HUGE = [2**31 - 1, 2**32 - 1, 2**48, 2**60, 2**61 + 1, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]
ABSURD = [b"-1", b"0", b"1e999", b"NaN", b"null", b"true", b"{}", b"[]", b'"\\ud800"', b'"../x"', b'"F16"', b'"BF16"']
ABSURD += [b"9" * 5000, b"[" * 100_000, *(str(number).encode() for number in HUGE)]


def mutate(raw, rng):
    """One or two of: flipped bits, changed bytes, zeroed or 0xff runs, huge integers, cuts, insertions, moved runs.

    Half of the places lie in the first 200 bytes, where counts, lengths and offsets are.
    """
    raw = bytearray(raw)
    for _ in range(rng.integers(1, 3)):
        if not raw:
            return bytes(raw)
        at = int(rng.integers(min(len(raw), 200 if rng.random() < 0.5 else len(raw))))
        run = int(rng.integers(1, 17))
        match int(rng.integers(9)):
            case 0:
                raw[at] ^= 1 << int(rng.integers(8))
            case 1:
                raw[at] = int(rng.integers(256))
            case 2:
                raw[at : at + run] = bytes(len(raw[at : at + run]))
            case 3:
                raw[at : at + run] = b"\xff" * len(raw[at : at + run])
            case 4:
                raw[at : at + 8] = struct.pack("<Q", int(rng.choice(np.array(HUGE, np.uint64))))
            case 5:
                raw[at:at] = struct.pack("<Q", int(rng.choice(np.array(HUGE, np.uint64))))
            case 6:
                del raw[at:]
            case 7:
                del raw[at : at + run]
            case 8:
                raw[at:at] = raw[: 4 * run]
    return bytes(raw)


def mutate_json(raw, rng):
    """JSON text in which one or two names, strings or numbers are replaced by absurd ones or by each other."""
    tokens = re.findall(rb'"[^"]*"|[\w.+-]+|\S', raw)
    values = [i for i, token in enumerate(tokens) if token not in (b"{", b"}", b"[", b"]", b":", b",")]
    for at in rng.choice(values, rng.integers(1, 3)):
        absurd = [*ABSURD, tokens[int(rng.choice(values))], tokens[int(rng.choice(values))]]
        tokens[at] = absurd[int(rng.integers(len(absurd)))]
    return b"".join(tokens)


def mutate_header(raw, rng):
    """A safetensors file whose JSON header is a mutant and has its length put right, so that the header is read."""
    length = int.from_bytes(raw[:8], "little")
    header = mutate_json(raw[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + raw[8 + length :]


def either(first, second):
    return lambda raw, rng: (first if rng.random() < 0.5 else second)(raw, rng)


def arrays():
    rng = np.random.default_rng(0)
    return {"a.weight": rng.random((4, 32), np.float32), "b": np.arange(6), "c": rng.random(3, np.float32) > 0.5}


def make_gguf(folder):
    tensors = {name: Tensor.from_array(a) for name, a in arrays().items() if a.dtype != np.bool_}
    for kind in ("Q8_0", "Q4_1", "Q4_K", "BF16"):
        form = KINDS[kind]
        tensors[kind] = Tensor((2, form.block), kind, np.arange(2 * form.size).astype(np.uint8))
    metadata = {"general.architecture": "llama", "general.alignment": 32, "n": 3, "eps": 1e-5, "flag": True}
    metadata |= {"tokens": ["a", "bc", "", "def"], "scores": np.ones(4, np.float32)}
    write_gguf(folder / "m.gguf", metadata, tensors)
    return folder / "m.gguf"


def make_safetensors(folder, name="m.safetensors"):
    fp8 = {"f.weight": Tensor((3, 5), "F8_E4M3", np.arange(15).astype(np.uint8))}
    write_safetensors(folder / name, arrays() | fp8 | {"f.weight_scale_inv": np.ones((1, 1), np.float32)})
    return folder / name


def make_index(folder):
    make_safetensors(folder, "one.safetensors")
    write_safetensors(folder / "two.safetensors", {"z": np.ones(2, np.float32)})
    place = dict.fromkeys([*arrays(), "f.weight", "f.weight_scale_inv"], "one.safetensors") | {"z": "two.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": place}))
    return index


def check(tensors):
    """Every tensor decodes to its own shape, or says why not."""
    for tensor in tensors.values():
        try:
            values = tensor.ints() if KINDS[tensor.kind].integer is not None else tensor.f32()
            tensor.groups()
            tensor.supers()
        except ModelError:
            continue
        assert values.shape == tensor.shape


TARGETS = {
    "gguf": (make_gguf, mutate, lambda path: GGUFFile.open(path).tensors),
    "safetensors": (
        make_safetensors,
        lambda raw, rng: (mutate, mutate_json)[rng.integers(2)](raw, rng),
        read_safetensors,
    ),
    "index": (make_index, mutate_json, lambda path: read_safetensors(path.parent)),
}


def main(kind, folder, cases):
    make, change, read = TARGETS[kind]
    path = make(Path(folder))
    original = path.read_bytes()
    check(read(path))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), resource.RLIM_INFINITY))
    loaded = refused = 0
    for seed in range(int(cases)):
        mutant = change(original, np.random.default_rng(seed))
        path.unlink()  # a new file each time: the last one may still be mapped
        path.write_bytes(mutant)
        signal.alarm(20)
        try:
            check(read(path))
            loaded += 1
        except ModelError as error:
            if str(path.parent) not in str(error) or "\n" in str(error):
                raise ValueError(f"seed {seed}: not one line that names the file") from error
            refused += 1
        except BaseException:
            print(f"{kind} seed {seed}: {mutant[:300]!r}", file=sys.stderr)
            raise
        finally:
            signal.alarm(0)
    print(loaded, refused)


if __name__ == "__main__":
    main(*sys.argv[1:])
