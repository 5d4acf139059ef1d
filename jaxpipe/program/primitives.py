"""Names of jax's primitives, by what they do; those of jax 0.10.2 to 0.12.

What each reader adds for a question of its own stands with it.
"""

# They compute nothing: what reads the result may read the operand.
FORMS = frozenset({"copy", "reshape", "rev", "squeeze", "transpose"})
# Over the devices of an axis; `jax.lax.psum_scatter` is a `reduce_scatter`.
COLLECTIVES = frozenset({"all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "psum_invariant"})
COLLECTIVES |= {"reduce_scatter"}
PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})
FOREIGN = frozenset({"ffi_call", "pallas_call", "pure_callback", "triton_kernel_call"})  # the last: of jax-triton
CALLS = frozenset({"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2"})
