"""Settings that make a run of TensorFlow repeatable and its memory comparable; import it before tensorflow.

TensorFlow would reserve nearly all of the GPU at its start, and then no saving of GPU memory could be seen. Its kernels
add in no fixed order, and its convolutions are chosen by their time, unless it is told to be deterministic, which is a
call: `repeatable`. Its notes on what the machine could do better are kept off stderr.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import keras
import tensorflow as tf


def repeatable() -> None:
    """The same operators in the same order, and the same weights and data, in each run."""
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
