"""GPT and LLaMA as their papers write them, in plain jnp, for plain autodiff.

Shares no code with `jaxpipe.models`, only names and layout of the parameters. What is dropped is asked of
`drop(name, array)`, which gives the array back where nothing is.
"""

import jax
import jax.numpy as jnp


def nothing_dropped(name, x):
    return x


def layer_norm(x, params):
    """Ba et al. 2016, equation 4."""
    mean = x.mean(axis=-1, keepdims=True)
    deviation = jnp.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    return (x - mean) / deviation * params["scale"] + params["bias"]


def rms_norm(x, params, epsilon=1e-5):
    """Zhang and Sennrich 2019, equation 4."""
    return x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * params["scale"]


def gelu(x):
    """Hendrycks and Gimpel 2016, section 2, the form with tanh."""
    return 0.5 * x * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)))


def gelu_feed_forward(params, x):
    """Vaswani et al. 2017, equation 2, with GELU."""
    return gelu(x @ params["up"]["kernel"] + params["up"]["bias"]) @ params["down"]["kernel"] + params["down"]["bias"]


def swiglu_feed_forward(params, x):
    """Shazeer 2020, equation 6."""
    gate, up = x @ params["gate"]["kernel"], x @ params["up"]["kernel"]
    return gate / (1 + jnp.exp(-gate)) * up @ params["down"]["kernel"]


def rotary(x, theta):
    """Su et al. 2021, equation 34, with planes (i, i + size / 2); `x` "batch head seq size"."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[-2])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.tile(jnp.cos(angle), 2), jnp.tile(jnp.sin(angle), 2)
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin


def attention(params, x, *, num_heads, num_kv_heads, theta=None, drop=nothing_dropped):
    """Vaswani et al. 2017, equation 1, with heads in groups (Ainslie et al. 2023), before the residual."""
    columns = x @ params["query_key_value"]["kernel"] + params["query_key_value"].get("bias", 0.0)
    group, size = num_heads // num_kv_heads, params["output"]["kernel"].shape[0] // num_heads
    queries, keys, values = [], [], []
    for of_group in jnp.split(columns, num_kv_heads, axis=-1):
        *in_group, key, value = jnp.split(of_group, group + 2, axis=-1)
        queries, keys, values = queries + in_group, keys + group * [key], values + group * [value]
    query, key, value = (jnp.stack(heads, axis=1) for heads in (queries, keys, values))  # "batch head seq size"
    if theta is not None:
        query, key = rotary(query, theta), rotary(key, theta)
    position = jnp.arange(x.shape[1])
    scores = query @ jnp.swapaxes(key, 2, 3) / size**0.5
    scores = jnp.where(position[:, None] >= position, scores, -jnp.inf)
    attended = drop("probabilities", jax.nn.softmax(scores)) @ value
    side_by_side = jnp.concatenate(list(jnp.moveaxis(attended, 1, 0)), axis=-1)
    return side_by_side @ params["output"]["kernel"] + params["output"].get("bias", 0.0)


def gpt_layer(config, params, x, drop=nothing_dropped):
    """Radford et al. 2019, section 2.3: a norm before each half, a residual around it."""
    normed = layer_norm(x, params["attention"]["norm"])
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_heads}
    x = x + drop("attention", attention(params["attention"], normed, **heads, drop=drop))
    normed = layer_norm(x, params["feed_forward"]["norm"])
    return x + drop("feed_forward", gelu_feed_forward(params["feed_forward"], normed))


def llama_layer(config, params, x, drop=nothing_dropped):
    """Touvron et al. 2023, section 2.2."""
    normed = rms_norm(x, params["attention"]["norm"], config.norm_epsilon)
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "theta": config.rope_theta}
    x = x + attention(params["attention"], normed, **heads)
    normed = rms_norm(x, params["feed_forward"]["norm"], config.norm_epsilon)
    return x + swiglu_feed_forward(params["feed_forward"], normed)


def cross_entropy_sum(x, kernel, targets):
    """The sum of -log softmax(x @ kernel.T)[target] over the targets that are not below 0."""
    logs = jax.nn.log_softmax(x @ kernel.T)
    chosen = jnp.take_along_axis(logs, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(targets >= 0, chosen, 0.0).sum()


def loss_sum(family, config, params, batch, drops=None):
    """The loss of a whole model.

    Args:
        family: "gpt" or "llama".
        drops: the `drop` of the embedding and then of every layer; None drops nothing.
    """
    drops = drops or [nothing_dropped] * (1 + config.num_layers)
    embedding, head = params["shared"]["embedding"], params["shared"]["head"]
    x = embedding["token"][batch["tokens"]]
    if family == "gpt":
        x = x + embedding["position"][: x.shape[1]]
    x = drops[0]("embedding", x)
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        x = {"gpt": gpt_layer, "llama": llama_layer}[family](config, layer, x, drops[i + 1])
    normed = layer_norm(x, head["norm"]) if family == "gpt" else rms_norm(x, head["norm"], config.norm_epsilon)
    return cross_entropy_sum(normed, embedding["token"] if config.tie_embeddings else head["kernel"], batch["targets"])
