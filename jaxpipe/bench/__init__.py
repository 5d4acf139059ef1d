"""`python -m jaxpipe.bench`: what one pipelined step costs against one unpipelined step of the same model."""
