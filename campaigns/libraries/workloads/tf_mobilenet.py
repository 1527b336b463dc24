"""MobileNetV2 in TensorFlow (Keras), random weights, synthetic images: training or inference. Prints one number.

python tf_mobilenet.py train|infer [--steps N] [--batch N] [--size PIXELS]

The network of keras.applications: 1000 classes, 224 x 224 pixels. Runs on what TensorFlow finds, a GPU if there is one.
"""

from __future__ import annotations

from tf_settings import repeatable  # isort: skip
import keras
import tensorflow as tf
from common import arguments, run

parser = arguments(steps=20, batch=32)
parser.add_argument("--size", type=int, default=224)
given = parser.parse_args()

CLASSES = 1000
repeatable()
images = tf.random.normal((given.batch, given.size, given.size, 3))
labels = tf.random.uniform((given.batch,), maxval=CLASSES, dtype=tf.int32)
model = keras.applications.MobileNetV2(
    input_shape=(given.size, given.size, 3), weights=None, classes=CLASSES, classifier_activation=None
)
optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
optimizer.build(model.trainable_variables)


# Functions without arguments: a graph is traced once, and not once for each number of a step.
@tf.function
def update() -> tf.Tensor:
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        value = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    optimizer.apply(tape.gradient(value, model.trainable_variables))
    return value


@tf.function
def forward() -> tf.Tensor:
    return tf.reduce_sum(tf.cast(model(images, training=False), tf.float64))


step = update if given.mode == "train" else forward
run(lambda _: step(), given.steps, float)
