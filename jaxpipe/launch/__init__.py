"""`python -m jaxpipe.launch`: several local processes that run one program together; needs no JAX."""
