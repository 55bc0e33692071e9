"""Works a while, then idles with what is live, as a training script between two epochs: unmodified PyTorch or JAX. Prints
"held", and goes on when it gets a line.

    live.py torch|jax"""
import json
import sys

if sys.argv[1] == "torch":
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 24).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x = torch.randn(16, 256, 1024, device="cuda")

    def advance():
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()
else:
    import jax
    import jax.numpy as jnp

    key = jax.random.PRNGKey(0)
    weights = [jax.random.normal(jax.random.fold_in(key, i), (4096, 4096)) / 64 for i in range(64)]
    x = jax.random.normal(key, (256, 4096))

    @jax.jit
    def gradients(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.mean(y ** 2)
        return jax.grad(loss)(weights)

    def advance():
        global weights
        weights = [w - 0.1 * g for w, g in zip(weights, gradients(weights, x))]
        return float(jnp.sum(weights[0]))

for _ in range(5):
    result = advance()
print("held", flush=True)
sys.stdin.readline()
print(json.dumps({"result": [result.hex(), advance().hex()]}), flush=True)
