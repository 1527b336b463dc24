"""A 65 M-parameter encoder-decoder Transformer in TensorFlow (Keras), random tokens. Prints one number.

python tf_transformer.py train|infer [--steps N] [--batch N] [--length N] [--blocks N]

The shapes of transformer.py. Runs on what TensorFlow finds, a GPU if there is one.
"""

from __future__ import annotations

from tf_settings import repeatable  # isort: skip
import keras
import tensorflow as tf
from common import arguments, run
from keras import layers

VOCABULARY, WIDTH, HEADS, INSIDE = 37000, 512, 8, 2048


class Block(layers.Layer):
    """Attention to itself, to `memory` if it is of a decoder, and two dense layers; normalized after each."""

    def __init__(self, is_decoder: bool) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.attends = [layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1) for _ in range(1 + is_decoder)]
        self.dense = [layers.Dense(INSIDE, "relu"), layers.Dense(WIDTH)]
        self.norms = [layers.LayerNormalization(epsilon=1e-5) for _ in range(2 + is_decoder)]
        self.drops = [layers.Dropout(0.1) for _ in range(3 + is_decoder)]

    def call(self, x: tf.Tensor, memory: tf.Tensor | None = None, training: bool = False) -> tf.Tensor:
        def add(number: int, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return self.norms[number](x + self.drops[number](y, training=training))

        x = add(0, x, self.attends[0](x, x, use_causal_mask=self.is_decoder, training=training))
        if self.is_decoder:
            x = add(1, x, self.attends[1](x, memory, training=training))
        y = self.drops[-1](self.dense[0](x), training=training)
        return add(len(self.norms) - 1, x, self.dense[1](y))


class Translator(keras.Model):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = layers.Embedding(VOCABULARY, WIDTH, keras.initializers.RandomNormal(stddev=1))
        self.encoder = [Block(is_decoder=False) for _ in range(blocks)]
        self.decoder = [Block(is_decoder=True) for _ in range(blocks)]
        self.norms = [layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]

    def call(self, source: tf.Tensor, target: tf.Tensor, training: bool = False) -> tf.Tensor:
        memory, x = self.embed(source), self.embed(target)
        for block in self.encoder:
            memory = block(memory, training=training)
        memory = self.norms[0](memory)
        for block in self.decoder:
            x = block(x, memory, training=training)
        # Weights shared with the embedding, as in the paper.
        return tf.matmul(self.norms[1](x), self.embed.embeddings, transpose_b=True)


parser = arguments(steps=10, batch=16)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--blocks", type=int, default=6)
given = parser.parse_args()

repeatable()
source = tf.random.uniform((given.batch, given.length), maxval=VOCABULARY, dtype=tf.int32)
target = tf.random.uniform((given.batch, given.length), maxval=VOCABULARY, dtype=tf.int32)
model = Translator(given.blocks)
model(source, target)  # makes the weights
optimizer = keras.optimizers.Adam(1e-4, beta_1=0.9, beta_2=0.98)
optimizer.build(model.trainable_variables)


# Functions without arguments: a graph is traced once, and not once for each number of a step.
@tf.function
def update() -> tf.Tensor:
    with tf.GradientTape() as tape:
        logits = model(source, target[:, :-1], training=True)
        value = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(target[:, 1:], logits))
    optimizer.apply(tape.gradient(value, model.trainable_variables))
    return value


@tf.function
def forward() -> tf.Tensor:
    return tf.reduce_sum(tf.cast(model(source, target, training=False), tf.float64))


step = update if given.mode == "train" else forward
run(lambda _: step(), given.steps, float)
