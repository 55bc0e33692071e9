"""A jitted training step of a few dozen buffers, and eager operations: an unmodified JAX program. Prints one JSON line."""
import json
import time

import jax
import jax.numpy as jnp

key = jax.random.PRNGKey(0)
weights = [jax.random.normal(jax.random.fold_in(key, i), (1024, 1024)) / 32 for i in range(24)]
x = jax.random.normal(key, (2048, 1024))


@jax.jit
def advance(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y ** 2)
    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights))]


jit, eager = [], []
for step in range(80):
    start = time.perf_counter()
    weights = advance(weights, x)
    jax.block_until_ready(weights)
    jit.append((time.perf_counter() - start) * 1e3)
y = weights[0]
for step in range(60):
    start = time.perf_counter()
    for _ in range(10):
        y = jnp.sin(y) * 1.01
    y.block_until_ready()
    eager.append((time.perf_counter() - start) * 1e3 / 20)
print(json.dumps({"result": [float(jnp.sum(w)).hex() for w in (weights[0], weights[-1], y)], "jit": jit[20:], "eager": eager[20:]}))
