"""A jitted step and some eager operations: an unmodified JAX program. Prints one JSON line."""
import json
import time

import jax
import jax.numpy as jnp

key = jax.random.PRNGKey(0)
w = jax.random.normal(key, (1024, 1024)) / 32
x = jax.random.normal(key, (512, 1024))


@jax.jit
def advance(w, x):
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * gradient


times = []
for step in range(60):
    start = time.perf_counter()
    w = advance(w, x)
    y = jnp.sin(w) + 1
    y.block_until_ready()
    times.append((time.perf_counter() - start) * 1e3)
print(json.dumps({"result": float(jnp.sum(w)).hex(), "ms": times[10:]}))
