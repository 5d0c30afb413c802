"""WeightMap: names to tensors, taken out one by one."""

import numpy as np
import pytest

from outpace.types import ModelError, UsageError
from outpace.weights.gguf import write_gguf
from outpace.weights.safetensors import write_safetensors
from outpace.weights.tensor import Tensor
from outpace.weights.weight_map import WeightMap


def small():
    return WeightMap.from_tensors(
        {
            "model.norm.weight": ([0.5, 1.5, 2.5], (3,)),
            "model.embed_tokens.weight": np.arange(6, dtype=np.float64).reshape(2, 3),
            "lm_head.weight": (np.arange(6), (3, 2)),
        }
    )


def test_take_removes_and_returns_values_and_shape():
    weights = small()
    assert len(weights) == 3
    values, shape = weights.take("model.embed_tokens.weight")
    assert (values.dtype, shape) == (np.float32, (2, 3))
    assert values.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not weights.has("model.embed_tokens.weight")
    assert weights.keys() == ["model.norm.weight", "lm_head.weight"]
    with pytest.raises(ModelError, match=r"'model\.embed_tokens\.weight' is missing"):
        weights.take("model.embed_tokens.weight")


def test_a_missing_name_is_named_with_its_neighbours():
    with pytest.raises(ModelError, match=r"'model\.norms\.weight' is missing .* closest are model\.norm\.weight"):
        small().take("model.norms.weight")
    with pytest.raises(ModelError, match="3 others, none close"):
        small().take_tensor("?")


def test_integers_stay_integers():
    weights = small()
    with pytest.raises(ModelError, match=r"'lm_head\.weight': a tensor of integers"):
        weights.take("lm_head.weight")
    weights = small()
    assert weights.take_tensor("lm_head.weight").ints().shape == (3, 2)


@pytest.mark.parametrize("value", [([1.0, 2.0], (3,)), (["x"], (1,)), ([[1.0], [1.0, 2.0]], (3,)), np.ones(2, complex)])
def test_data_that_does_not_fit_its_shape(value):
    with pytest.raises(UsageError, match="tensor 't': "):
        WeightMap.from_tensors({"t": value})


def test_put_and_rename():
    weights = small()
    weights.rename("model.norm.weight", "norm")
    weights.rename("norm", "norm")
    weights.put("extra", Tensor.from_array(np.ones(1, np.float32)))
    assert set(weights) == {"norm", "extra", "model.embed_tokens.weight", "lm_head.weight"}
    for act in (
        lambda: weights.put("norm", Tensor.from_array(np.ones(1, np.float32))),
        lambda: weights.rename("extra", "norm"),
    ):
        with pytest.raises(ModelError, match="'norm' is already"):
            act()
    assert weights.take("norm")[0].tolist() == [0.5, 1.5, 2.5]
    with pytest.raises(ModelError, match="'gone' is missing"):
        weights.rename("gone", "x")


def test_from_files(tmp_path):
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    write_safetensors(tmp_path / "model.safetensors", {"w": values})
    write_gguf(tmp_path / "m.gguf", {}, {"blk.0.w": Tensor.from_array(values)})
    assert np.array_equal(WeightMap.from_safetensors(tmp_path).take("w")[0], values)
    assert np.array_equal(WeightMap.from_safetensors(tmp_path / "model.safetensors").take("w")[0], values)
    assert np.array_equal(WeightMap.from_gguf(tmp_path / "m.gguf").take("blk.0.w")[0], values)


def test_rows_are_put_in_order_when_taken() -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    order = np.array([2, 0, 3, 1])

    def weights() -> WeightMap:
        return WeightMap({"a": Tensor.from_array(array), "b": Tensor.from_array(array)}, {"a": order})

    assert np.array_equal(weights().take("a")[0], array[order])
    assert np.array_equal(weights().take("b")[0], array)
    renamed = weights()
    renamed.rename("a", "c")
    assert np.array_equal(renamed.take("c")[0], array[order])
    emptied = weights()
    emptied.clear()
    assert len(emptied) == 0
    emptied.put("a", Tensor.from_array(array))
    assert np.array_equal(emptied.take("a")[0], array)
