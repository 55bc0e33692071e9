"""Works with one family of GPU memory: an unmodified program. Prints one JSON line.

    family.py torch          as PYTORCH_CUDA_ALLOC_CONF says
    family.py jax            as XLA_PYTHON_CLIENT_ALLOCATOR says
    family.py cupy-async     CuPy's stream-ordered pool
    family.py cupy-managed   managed memory, 64 MiB of it"""
import json
import sys

what = sys.argv[1]
if what == "torch":
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0), 3).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(20):
        x = torch.randn(8, 32 + 16 * (step % 5), 256, device="cuda")
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if step % 7 == 6:
            torch.cuda.empty_cache()
    host = torch.empty(1 << 20, pin_memory=True)
    host.copy_(torch.arange(1 << 20, device="cuda", dtype=torch.float32))
    result = [loss.item().hex(), float(host.double().sum())]
elif what == "jax":
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.PRNGKey(0), (512, 512))

    @jax.jit
    def advance(w):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    w = x / 32
    for step in range(20):
        w = advance(w)
        y = jnp.sin(w[: 100 + 10 * step]) + 1
    result = [float(jnp.sum(w)).hex(), float(jnp.sum(y)).hex()]
else:
    import cupy

    if what == "cupy-async":
        pool = cupy.cuda.MemoryAsyncPool()
        cupy.cuda.set_allocator(pool.malloc)
    else:
        cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
    x = cupy.arange(4 << 20, dtype=cupy.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        y = cupy.sqrt(x) * 1.5
        stream.synchronize()
    for step in range(20):
        y = cupy.sqrt(y[: -1000 * (step + 1)] + 0.5) * 1.0001
    result = [float(y.sum()).hex(), y.size]
print(json.dumps({"result": result}))
