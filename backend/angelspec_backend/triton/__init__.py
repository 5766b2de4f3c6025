"""The Triton models: the only package that imports triton_python_backend_utils."""
