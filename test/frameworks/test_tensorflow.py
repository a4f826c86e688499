"""torch_hlo.tf.function: TensorFlow's functions, and Keras on TensorFlow. Values are TensorFlow's."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import pytest

import torch_hlo
from torch_hlo.device import dlpack

tf = pytest.importorskip(
    "tensorflow", reason="needs TensorFlow: pip install 'torch_hlo[tensorflow]'"
)
X = np.random.RandomState(0).randn(4, 3).astype("f")


def same(got, want, rtol=1e-5):
    tf.nest.assert_same_structure(got, want)
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        if tf.is_tensor(b):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)
        else:
            assert a is b


def loop(x):
    total = tf.zeros_like(x)
    for _ in tf.range(4):
        if tf.reduce_sum(total) > 2.0:
            total += 1.0
        else:
            total += x * x
    return total


@pytest.mark.parametrize(
    "f",
    [
        lambda x: tf.nn.softmax(tf.tanh(x @ tf.transpose(x)) + 1.0),
        lambda x: {"sum": tf.reduce_sum(x, 0), "rest": (x, None, [x > 0, tf.argmax(x, 1)])},
        lambda x: tf.nn.gelu(x) + tf.math.erf(x),
        lambda x: (tf.constant(3), tf.shape(x), tf.zeros((0, 2))),
        lambda x: tf.cast(x, tf.bfloat16) * 2,
        lambda x: tf.complex(x, x) * 2j,
        lambda x: tf.nn.conv2d(tf.reshape(x, (1, 4, 3, 1)), tf.ones((2, 2, 1, 2)), 1, "SAME"),
        lambda x: tf.sort(x, 1, "DESCENDING"),
        lambda x: tf.gather(x, [2, 0]) + tf.random.stateless_uniform((2, 3), [1, 2], alg="philox"),
        lambda x: tf.linalg.einsum("ij,kj->ik", x, x),
        lambda x: tf.map_fn(lambda row: tf.cumsum(row), x),
        lambda x: None,
        loop,
    ],
)
def test_values_are_tensorflows(f):
    same(torch_hlo.tf.function(f)(tf.constant(X)), tf.function(f)(tf.constant(X)))


class Pair(NamedTuple):
    a: object
    b: object


def test_arguments():
    traced = []

    @torch_hlo.tf.function
    def f(pair, scale=2.0, *, names=("x",), flag=False):
        traced.append(1)
        return Pair(pair.b * scale, pair.a[names[0]] - 1 if flag else pair.a[names[0]])

    x, y = tf.constant(X), tf.constant([1, 2])
    one = f(Pair({"x": x}, y), scale=3)
    same(one, Pair(y * 3, x))
    same(f(Pair({"x": X + 1}, y), scale=3), Pair(y * 3, x + 1))
    assert len(traced) == 1
    same(f(Pair({"x": x}, y), 3, flag=True), Pair(y * 3, x - 1))
    same(f(Pair({"x": x[:2]}, y), 3), Pair(y * 3, x[:2]))
    same(f(Pair({"x": x}, y), scale=-3), Pair(y * -3, x))
    assert len(traced) == 4


def test_nothing_is_copied():
    f = torch_hlo.tf.function(lambda x: x * 2)
    x = tf.ones((1000, 100))
    y = f(x)
    first = np.from_dlpack(y)
    z = f(y)
    assert (np.asarray(first) == 2).all() and (z.numpy() == 4).all()


def test_variables_are_read_and_written():
    class Counter(tf.Module):
        def __init__(self):
            self.w = tf.Variable(tf.constant(X))
            self.steps = tf.Variable(0, dtype=tf.int64)
            self.extra = None

        @torch_hlo.tf.function
        def step(self, x):
            if self.extra is None:
                self.extra = tf.Variable(tf.fill((3,), 2.0))
            self.steps.assign_add(1)
            self.w.assign(self.w * 0.5 + x)
            return tf.reduce_sum(self.w) + self.extra

    counter = Counter()
    w = X
    for i in range(4):
        got = counter.step(tf.fill((4, 3), float(i)))
        w = w * 0.5 + i
        np.testing.assert_allclose(got, np.full(3, w.sum() + 2), rtol=1e-5)
        assert int(counter.steps) == i + 1
    np.testing.assert_allclose(counter.w, w, rtol=1e-5)
    counter.w.assign(tf.zeros((4, 3)))
    assert float(counter.step(tf.ones((4, 3)))[0]) == 14


def test_gradients_from_outside():
    w, b, n = tf.Variable(X.T), tf.Variable(tf.ones(4)), tf.Variable(0)

    def f(x, k):
        n.assign_add(1)
        return tf.tanh(x @ w * k) + b, tf.reduce_sum(x * x), tf.argmax(x, 1)

    ours = torch_hlo.tf.function(f)
    x = tf.constant(X)
    found = []
    for g in (ours, tf.function(f)):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y, z, _ = g(x, 0.3)
            loss = tf.reduce_sum(y * y) * z
        found.append(tape.gradient(loss, [x, w, b]))
        found[-1].append(tape.gradient(z, x))
        assert tape.gradient(z, b) is None or not np.any(tape.gradient(z, b))
    same(*found)
    assert int(n) == 2  # backward does not count


def test_gradients_see_the_values_of_the_forward():
    v = tf.Variable(3.0)

    @torch_hlo.tf.function
    def f(x):
        y = x * v * v
        v.assign(100.0)
        return y

    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    v.assign(7.0)
    same(tape.gradient(y, [x, v]), [tf.constant(9.0), tf.constant(12.0)])


def test_second_gradients_and_tensors_from_outside():
    c = tf.constant(1.5)
    f = torch_hlo.tf.function(lambda x: x * x * x * c)
    x = tf.constant(2.0)
    with tf.GradientTape(persistent=True) as outer:
        outer.watch([x, c])
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = f(x)
        dx = inner.gradient(y, x)
    same(
        [y, dx, outer.gradient(dx, x), outer.gradient(y, c)],
        [tf.constant(v) for v in (12.0, 18.0, 18.0, 8.0)],
    )


def test_functions_call_functions():
    inner = torch_hlo.tf.function(lambda x: x + 1)
    same(torch_hlo.tf.function(lambda x: inner(x) * 2)(tf.ones(3)), tf.fill((3,), 4.0))
    with pytest.raises(RuntimeError, match="compile that one with torch_hlo.tf.function"):
        tf.function(lambda x: inner(x) * 2)(tf.ones(3))


def test_what_is_refused():
    f = torch_hlo.tf.function(lambda x, n: tf.reshape(x, n))
    same(f(tf.ones(6), (2, 3)), tf.ones((2, 3)))
    with pytest.raises(ValueError, match="compile-time constant") as caught:
        f(tf.ones(6), tf.constant([2, 3]))
    assert "Python number" in caught.value.__notes__[0]
    with pytest.raises(Exception, match="rng"):
        torch_hlo.tf.function(lambda x: x + tf.random.normal((3,)))(tf.ones(3))
    with pytest.raises(TypeError, match="RaggedTensor"):
        torch_hlo.tf.function(lambda x: x)(tf.ragged.constant([[1], [2, 3]]))
    with pytest.raises((TypeError, ValueError), match="DT_STRING|string"):
        torch_hlo.tf.function(lambda x, s: x)(tf.ones(3), tf.constant("a"))
    with pytest.raises(Exception, match="division"):
        torch_hlo.tf.function(lambda x: x * (1 // 0))(tf.ones(3))


def test_arrays_are_given_back_while_python_raises_and_when_it_has_ended():
    f = torch_hlo.tf.function(lambda x: x + 1)

    def fail():
        kept = f(tf.ones(1000))
        raise KeyError(kept.shape[0])

    with pytest.raises(KeyError, match="1000"):
        fail()
    f(tf.ones(1000))
    assert len(dlpack.exports().held) < 5
    text = (
        "import tensorflow as tf, torch_hlo; x = torch_hlo.tf.function(lambda x: x + 1)(tf.ones(3))"
    )
    assert subprocess.run([sys.executable, "-c", text], timeout=200).returncode == 0


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_keras_trains(optimizer):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("KERAS_BACKEND is another")
    x, y = (
        np.random.RandomState(1).randn(3, 16, 8, 8, 1).astype("f"),
        np.arange(48).reshape(3, 16) % 3,
    )

    def train(decorate):
        keras.utils.set_random_seed(0)
        layers = [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3),
        ]
        net = keras.Sequential(layers)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        steps = getattr(keras.optimizers, optimizer)(0.01)

        @decorate
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, net(x, training=True))
            gradients = tape.gradient(loss, net.trainable_variables)
            steps.apply_gradients(zip(gradients, net.trainable_variables))
            return loss

        losses = [float(step(*batch)) for _ in range(4) for batch in zip(x, y)]
        return losses, net(x[0]).numpy()

    got, want = train(torch_hlo.tf.function), train(tf.function(jit_compile=True))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-2, atol=1e-3)
    assert got[0][-1] < got[0][0]
